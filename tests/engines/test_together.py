"""Conversations at once on a real engine, everything on `auto`: the same answers as one at a time; and one that runs away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.engines import sglang_env, vllm_env
from tests.engines.worker_life import START_SECONDS, Workers
from tests.processes import ValkeyServer, until

from turnmill.settings import Farm

pytestmark = pytest.mark.timeout(400)

CONVERSATIONS = [
    {"id": f"c{i}", "turns": [f"Tell me of number {i}.", f"And of {i + 1}?", "Go on."]}
    for i in range(5)
]
GREEDY = ("--temperature", "0", "--repetition-penalty", "1", "--max-tokens", "24")


class Runs:
    """Runs on a farm with one worker."""

    def __init__(self, farm: Farm, folder: Path) -> None:
        self._farm, self._folder = farm, folder

    def turnmill(self, *line: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "turnmill", *line],
            cwd=self._folder,
            env={**os.environ, "REDIS_URL": self._farm.url},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run(
        self, name: str, conversations: list[dict[str, Any]], *options: str
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The report, and what was said."""
        file = self._folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(one) + "\n" for one in conversations))
        report = self.turnmill("run", file.name, "--run", name, "--json", *options)
        replies = (self._folder / "runs" / name / "replies.jsonl").read_text().splitlines()
        return json.loads(report), [json.loads(line) for line in replies]


@pytest.fixture(
    params=[
        pytest.param("sglang", marks=pytest.mark.sglang),
        pytest.param("vllm", marks=pytest.mark.vllm),
    ]
)
def runs(
    request: pytest.FixtureRequest, own_valkey: Callable[..., ValkeyServer], tmp_path: Path
) -> Iterator[Runs]:
    model: Path = request.getfixturevalue(f"{request.param}_model")
    of_engine = {"sglang": sglang_env, "vllm": vllm_env}[request.param]
    farm = Farm(own_valkey().url)
    environment, log = of_engine.environment(), tmp_path / "worker.log"
    workers = Workers(request.param, farm, model, of_engine.ARGUMENTS, environment, log)
    worker = workers.start()

    def serves() -> bool:
        assert worker.poll() is None, log.read_text()
        with redis.Redis.from_url(farm.url) as connection:
            return bool(connection.scard(farm.keys.workers))

    try:
        until(serves, "the worker serves", START_SECONDS)
        yield Runs(farm, tmp_path)
    finally:
        workers.end()


def test_together_as_alone_and_a_runaway(runs: Runs) -> None:
    alone, one_by_one = runs.run("alone", CONVERSATIONS, "--concurrency", "1", *GREEDY)
    runs.turnmill("forget", "alone", "--yes")
    together, at_once = runs.run("together", CONVERSATIONS, *GREEDY)
    assert together["asked"] == alone["asked"] == 15
    said = [[message for message in result["messages"]] for result in at_once]
    assert said == [result["messages"] for result in one_by_one]
    rate = together["tokens"]["completion"] / together["seconds"]
    print(f"together {rate / (alone['tokens']['completion'] / alone['seconds']):.2f} times alone")

    runaway = {
        "id": "runaway",
        "turns": ["Never stop.", "Unasked.", "Unasked."],
        "sampling": {"max_tokens": 100_000, "ignore_eos": True},
    }
    others = [one | {"id": f"other {one['id']}"} for one in CONVERSATIONS[:4]]
    report, results = runs.run("runaway", [runaway, *others], "--max-tokens", "24")
    assert report["outcomes"] == {"completed": 4, "capped": 1, "failed": 0, "cancelled": 0}
    assert results[0]["capped"] == "context"
    assert len(results[0]["turns"]) == 1
    usage = results[0]["turns"][0]["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] > 400
