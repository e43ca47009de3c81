"""A producer that is killed again and again writes, in the end, what an undisturbed one writes."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from tests.acceptance.conftest import Cli
from tests.processes import SimWorker, until

from turnmill.output import read_results
from turnmill.settings import Farm

pytestmark = pytest.mark.faults

CONVERSATIONS, TURNS, KILLS = 60, 3, 10
SIM = ("--answer", "history-hash", "--latency", "0.03")
GREEDY, DRAW = {"temperature": 0}, {"temperature": 1}


@pytest.fixture
def producers(tmp_path: Path) -> Iterator[Callable[[Farm], Cli]]:
    made: list[Cli] = []

    def make(farm: Farm) -> Cli:
        made.append(Cli(tmp_path, farm))
        return made[-1]

    yield make
    for process in (process for cli in made for process in cli.started):
        if process.poll() is None:
            process.kill()
        process.communicate()


def done(farm: Farm) -> int:
    """Turns of the run that are answered."""
    with redis.Redis.from_url(farm.url) as connection:
        return int(connection.hget(farm.keys.run("r"), "done") or 0)  # type: ignore[arg-type]


def test_killed_ten_times_at_random_it_writes_the_same_bytes(
    worker: Callable[..., SimWorker], producers: Callable[[Farm], Cli], farm: Farm
) -> None:
    undisturbed = Farm(farm.url, f"{farm.namespace}-undisturbed")
    for where in (farm, farm, undisturbed):
        worker("--served-name", "sim", "--slots", "6", sim=SIM, farm=where)
    cli = producers(farm)
    source = cli.write(
        [
            # The greedy ones are alike in pairs, and share their turns.
            {
                "id": f"c{i}",
                "turns": [f"start {i // 4 if i % 2 else i}", *["on"] * (TURNS - 1)],
                "sampling": GREEDY if i % 2 else DRAW,
            }
            for i in range(CONVERSATIONS)
        ]
    )
    line = ("run", str(source), "--run", "r", "--model", "sim", "--json")

    asked = CONVERSATIONS * TURNS * 3 // 4
    chance = random.Random(4)
    for answered in sorted(chance.sample(range(asked - 5), KILLS)):
        process = cli.start(*line, "--out", str(cli.folder / "killed"))
        until(lambda at=answered: done(farm) >= at, f"{answered} turns are answered")
        process.kill()
        process.wait()
        partial = cli.folder / "killed/replies.partial.jsonl"
        if partial.exists():
            read_results(partial)
    killed = json.loads(cli(*line, "--out", str(cli.folder / "killed")).stdout)
    assert killed["outcomes"]["completed"] == CONVERSATIONS
    assert killed["from_store"] > 0

    producers(undisturbed)(*line, "--out", str(cli.folder / "whole"))
    written = (cli.folder / "killed/replies.jsonl").read_bytes()
    assert written == (cli.folder / "whole/replies.jsonl").read_bytes()
    assert written.count(b"\n") == CONVERSATIONS

    # No attempt asked for what another had asked for, and nothing was answered twice.
    with redis.Redis.from_url(farm.url) as connection:
        told = Counter(
            entry[b"h"]
            for _, entry in connection.xrange(farm.keys.finished("sim"))  # type: ignore[union-attr]
        )
    assert len(told) == asked
    assert set(told.values()) == {1}
    status = json.loads(cli("status", "--json").stdout)
    (run,) = status["runs"]
    assert (run["total"], run["done"]) == (asked, asked)
    depth = status["queues"]["sim"]
    assert (depth["queued"], depth["running"], depth["suspects"]) == (0, 0, 0)
