"""All 800 multi-turn conversations of the Berkeley benchmark, by an engine that plays the right answers, through kills."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.clients.environments import HERE, python_of
from tests.processes import SimWorker, until

from turnmill.settings import Farm

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

# One entry of miss_func asks for a tool that is withheld: its own right answer is judged wrong.
SCORES = {"base": 1.0, "miss_func": 0.995, "miss_param": 1.0, "long_context": 1.0}


@pytest.fixture(scope="session")
def python() -> Path:
    return python_of("bfcl")


class Bench:
    """Runs of the benchmark, in the environment that has it."""

    def __init__(self, python: Path, farm: Farm, folder: Path) -> None:
        self._python, self._farm, self.folder = python, farm, folder
        self._environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(folder),
            "REDIS_URL": farm.url,
            "TURNMILL_NAMESPACE": farm.namespace,
        }

    def play(self, category: str) -> str:
        path = self.folder / f"{category}.jsonl"
        line = [self._python, HERE / "bfcl" / "ground_truth.py", category, path]
        subprocess.run(line, env=self._environment, check=True, timeout=120)
        return str(path)

    def python(self, script: Path) -> str:
        line = [self._python, script]
        done = subprocess.run(
            line, cwd=self.folder, env=self._environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, category: str, *more: str) -> subprocess.Popen[str]:
        line = [
            "run",
            category,
            "--run",
            category.replace(",", "."),
            "--scaffold",
            "bfcl_multi_turn",
            "--json",
        ]
        return subprocess.Popen(
            [self._python, "-m", "turnmill", *line, "--temperature", "0.001", *more],
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ends(self, process: subprocess.Popen[str], exits: int = 0) -> dict[str, Any]:
        out, err = process.communicate(timeout=300)
        assert process.returncode == exits, err
        report = json.loads(out)
        assert isinstance(report, dict)
        return report

    def results(self, category: str) -> list[dict[str, Any]]:
        lines = (self.folder / "runs" / category / "replies.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def done(self, category: str) -> int:
        with redis.Redis.from_url(self._farm.url) as connection:
            return int(connection.hget(self._farm.keys.run(category), "done") or 0)


@pytest.fixture
def bench(python: Path, farm: Farm, tmp_path: Path) -> Bench:
    return Bench(python, farm, tmp_path)


@pytest.mark.parametrize("category", list(SCORES))
def test_the_right_answers_are_right_through_kills(
    bench: Bench, worker: Callable[..., SimWorker], category: str
) -> None:
    # So slow that there is a middle to be killed in.
    sim = ("--play", bench.play(category), "--latency", "0.1", "--context", "1000000")
    workers = [worker(lease=0.5, sim=sim), worker(lease=0.5, sim=sim)]
    process = bench.start(category)
    until(lambda: bench.done(category) >= 200, "they are busy", 120)
    workers[0].kill()
    worker(lease=0.5, sim=sim)
    until(lambda: bench.done(category) >= 500, "the others go on", 120)
    process.kill()
    process.communicate()
    before = bench.done(category)
    process = bench.start(category, "--model", "sim")
    until(lambda: bench.done(category) >= before + 100, "it goes on", 120)
    workers[1].kill()
    report = bench.ends(process)
    assert report["outcomes"]["completed"] == 200
    assert report["scores"] == {"count": 200, "mean": SCORES[category]}
    assert report["from_store"] >= before - 100
    assert sum(len(result["turns"]) for result in bench.results(category)) == bench.done(category)


def test_prompts_are_those_of_the_benchmark_itself(bench: Bench) -> None:
    assert int(bench.python(HERE / "bfcl" / "upstream.py")) == 3336


def test_the_time_zone_of_a_machine_changes_nothing(bench: Bench) -> None:
    """A run may go on elsewhere. The simulated trading bot formats dates in local time."""
    assert bench.python(HERE / "bfcl" / "zones.py") == "1\n"


def test_two_attempts_are_told_the_same(bench: Bench) -> None:
    assert "sort(by name), then" in bench.python(HERE / "bfcl" / "same.py")


def test_a_call_that_is_cut_off_is_told_again_as_json(
    bench: Bench, worker: Callable[..., SimWorker]
) -> None:
    """The turn ends, and so would the conversation: engines refuse messages with calls that they cannot read."""
    play = Path(bench.play("base"))
    scenes = [json.loads(line) for line in play.read_text().splitlines()]
    turns = [one for one in scenes if one["users"][0] == scenes[0]["users"][0]]
    cut = {"tool_calls": [{"name": "ls", "arguments": '{"a": '}]}
    play.write_text("".join(json.dumps(one | {"answers": [cut]}) + "\n" for one in turns))
    worker(sim=("--play", str(play)))
    bench.ends(bench.start("base", "--limit", "1"))
    (result,) = bench.results("base")
    assert (result["ending"], result["score"]) == ("wrong", 0.0)
    told = [one for one in result["messages"] if one["role"] == "assistant"]
    assert len(told) == len(turns)
    for message in told:
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"malformed": '{"a": '}


def test_what_the_model_writes_is_not_run(bench: Bench) -> None:
    """Calls are evaluated as Python by the benchmark: what is no call of its classes must do nothing, and what is one must end."""
    said = bench.python(HERE / "bfcl" / "evil.py")
    refused = ("open", "power", "square_root", "logarithm", "round_number")
    assert said.splitlines() == [
        *(f"Error during execution: name 'no_function_{name}' is not defined" for name in refused),
        '{"result": 81}',
    ]
    assert not (bench.folder / "evil").exists()


def test_too_many_steps_and_a_full_context(bench: Bench, worker: Callable[..., SimWorker]) -> None:
    first = json.loads(Path(bench.play("base")).read_text().splitlines()[0])["users"]
    call = {"tool_calls": [{"name": "ls", "arguments": {}}]}
    (bench.folder / "long.jsonl").write_text(json.dumps({"users": first, "answers": [call] * 30}))
    sim = ("--play", str(bench.folder / "long.jsonl"))
    one = worker(sim=sim)
    bench.ends(bench.start("base", "--limit", "1"))
    (result,) = bench.results("base")
    assert (result["ending"], result["capped"], result["score"]) == ("max_steps", "turns", 0.0)
    assert len(result["turns"]) == 21
    one.kill()
    worker("--served-name", "small", sim=(*sim, "--context", "300"))
    bench.ends(bench.start("base", "--limit", "1", "--model", "small", "--extend"))
    (result,) = bench.results("base")
    assert (result["ending"], result["capped"]) == ("context_overflow", "context")


def test_a_category_that_is_none(bench: Bench) -> None:
    process = bench.start("base,single")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "no multi-turn category 'single': base, miss_func, miss_param, long_context" in err
