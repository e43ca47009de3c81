"""`turnmill suite`: several runs from one file, resumable as one."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance.conftest import Cli
from tests.processes import SimWorker, until

from turnmill.settings import Farm

Workers = Callable[..., SimWorker]

THREE = """
[defaults]
data = "in.jsonl"
model = "sim"

[greedy]
sampling = { temperature = 0 }

[t10_32k]
sampling = { temperature = 1.0, max_tokens = 32768 }
epochs = 2

[scored]
data = "dice.jsonl"
scaffold = "tests.acceptance.dicing:dicing"
set = { sandbox = "sandbox", log = "log", pause = 0 }
"""


@pytest.fixture
def three(on_farm: Cli) -> Path:
    on_farm.write([{"id": f"c{i}", "turns": [f"number {i}", "on"]} for i in range(10)])
    on_farm.write([{"id": f"d{i}"} for i in range(3)], "dice.jsonl")
    (on_farm.folder / "sandbox").mkdir()
    return suite(on_farm, THREE)


def suite(cli: Cli, text: str) -> Path:
    path = cli.folder / "night.toml"
    path.write_text(text)
    return path


def runs(out: str) -> dict[str, dict[str, Any]]:
    found = json.loads(out)
    assert found["suite"] == "night"
    return {run["name"]: run for run in found["runs"]}


def asked(out: str) -> dict[str, int]:
    return {name: run["report"]["asked"] for name, run in runs(out).items()}


def ended(cli: Cli, run: str) -> int:
    path = cli.folder / "runs" / run / "replies.partial.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def finished(cli: Cli, run: str) -> bool:
    return (cli.folder / "runs" / run / "replies.jsonl").exists()


def test_runs_one_after_the_other_and_again_from_the_store(
    on_farm: Cli, three: Path, worker: Workers
) -> None:
    worker()
    before = on_farm("suite", "night.toml", "--dry-run", "--json").stdout
    assert {name: run["outlook"]["next"] for name, run in runs(before).items()} == {
        "greedy": 10,
        "t10_32k": 20,
        "scored": 3,
    }
    one = on_farm("suite", "night.toml", "t10_32k", "--json")
    assert asked(one.stdout) == {"t10_32k": 40}
    done = on_farm("suite", "night.toml", "--json").stdout
    assert asked(done) == {"greedy": 20, "t10_32k": 0, "scored": 12}
    assert runs(done)["scored"]["report"]["scores"] == {"count": 3, "mean": 0.4}
    for run in ("night-greedy", "night-t10_32k", "night-scored"):
        assert finished(on_farm, run)
    again = on_farm("suite", "night.toml")
    assert "run night-scored (3 of 3)" in again.stderr
    assert "run night-scored has ended: 3 completed, score 0.4000" in again.stderr
    assert [line.split() for line in again.stdout.splitlines()[1:]] == [
        ["run", "completed", "score", "asked", "stored"],
        ["night-greedy", "10", "0", "20"],
        ["night-t10_32k", "20", "0", "40"],
        ["night-scored", "3", "0.4000", "0", "12"],
    ]


def test_a_spent_budget_does_not_keep_the_others(
    on_farm: Cli, three: Path, worker: Workers
) -> None:
    worker(sim=("--reject-if", "number 3"))
    suite(on_farm, THREE.replace('model = "sim"', 'model = "sim"\nmax_failures = 1'))
    done = on_farm("suite", "night.toml", "--json", exits=1)
    found = runs(done.stdout)
    assert [run["budget_spent"] for run in found.values()] == [False, True, False]
    assert found["scored"]["report"]["outcomes"]["completed"] == 3
    assert "The failure budget is spent: night-t10_32k." in done.stderr
    table = on_farm("suite", "night.toml", exits=1).stdout.splitlines()
    assert table[1].split()[-1] == "budget"
    assert [line.split()[-1] == "spent" for line in table[2:]] == [False, True, False]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_it_goes_on_where_it_was_stopped(
    on_farm: Cli, three: Path, worker: Workers, number: signal.Signals, code: int
) -> None:
    worker("--slots", "4", sim=("--latency", "0.1"))
    process = on_farm.start("suite", "night.toml", "--json")
    until(lambda: ended(on_farm, "night-t10_32k") >= 3, "the second run is under way")
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, "")
    if code > 0:
        assert "The same command goes on" in err
    assert not finished(on_farm, "night-t10_32k")
    assert not (on_farm.folder / "runs/night-scored").exists()
    counts = asked(on_farm("suite", "night.toml", "--json").stdout)
    assert counts["greedy"] == 0
    assert 0 < counts["t10_32k"] <= 34
    assert counts["scored"] == 12


def test_a_run_that_is_cancelled_ends_the_suite(on_farm: Cli, three: Path, worker: Workers) -> None:
    worker("--slots", "2", sim=("--latency", "0.2"))
    process = on_farm.start("suite", "night.toml", "t10_32k", "scored", "--json")
    until(lambda: ended(on_farm, "night-t10_32k") >= 1, "it is under way")
    on_farm("cancel", "night-t10_32k")
    out, err = process.communicate(timeout=30)
    assert process.returncode == 143, err
    assert "A run was cancelled" in err
    assert list(runs(out)) == ["t10_32k"]


def test_nothing_is_asked_if_any_run_is_refused(on_farm: Cli, three: Path, worker: Workers) -> None:
    worker()
    on_farm("suite", "night.toml", "t10_32k")
    suite(on_farm, THREE.replace("epochs = 2", "epochs = 3"))
    refused = on_farm("suite", "night.toml", exits=2).stderr
    assert "run 'night-t10_32k' was begun with other epochs" in refused
    assert not (on_farm.folder / "runs/night-greedy").exists()
    assert asked(on_farm("suite", "night.toml", "t10_32k", "--extend", "--json").stdout) == {
        "t10_32k": 20
    }
    for text, says in (
        (THREE + "epoch = 1\n", "night.toml: [scored] epoch: unknown key, did you mean epochs?"),
        (THREE.replace("dice.jsonl", "gone"), "night.toml: [scored] gone: cannot be read"),
    ):
        suite(on_farm, text)
        refused = on_farm("suite", "night.toml", exits=2).stderr
        assert says in refused
        assert len(refused.splitlines()) == 1
    assert "there is no [x]" in on_farm("suite", "night.toml", "x", exits=2).stderr
    assert "gone.toml: cannot be read" in on_farm("suite", "gone.toml", exits=2).stderr
    status = json.loads(on_farm("status", "--json").stdout)
    assert [run["name"] for run in status["runs"]] == ["night-t10_32k"]


def test_a_wrong_password_is_permanent(
    make_cli: Callable[..., Cli], own_valkey: Callable[..., Any]
) -> None:
    cli = make_cli(Farm(own_valkey(requirepass="secret").url))
    cli.conversations(1)
    suite(cli, '[a]\ndata = "in.jsonl"\nmodel = "sim"\n')
    assert "Redis refuses" in cli("suite", "night.toml", exits=3).stderr


ALONE = """
[defaults]
data = "in.jsonl"
engine = "sim"

[a]
seed = 1

[b]
seed = 2

[other]
served_name = "other"
slots = 2
"""


def workers_started(cli: Cli) -> list[str]:
    return sorted(path.parent.name for path in cli.folder.glob("runs/*/worker.log"))


def test_without_a_farm_a_worker_stays_as_long_as_it_is_wanted(alone: Cli) -> None:
    alone.conversations(3)
    suite(alone, ALONE)
    done = runs(alone("suite", "night.toml", "--json").stdout)
    assert [run["report"]["outcomes"]["completed"] for run in done.values()] == [3, 3, 3]
    assert workers_started(alone) == ["night-a", "night-other"]
    for path in alone.folder.glob("runs/*/worker.log"):
        path.unlink()
    assert set(asked(alone("suite", "night.toml", "--json").stdout).values()) == {0}
    assert workers_started(alone) == []
    # Another model under the same name would not have been answered from the store, either.
    suite(alone, ALONE.replace('"other"\n', '"another"\n'))
    refused = alone("suite", "night.toml", "other", exits=2).stderr
    assert "run 'night-other' was begun with other model" in refused


def test_what_a_worker_refuses_is_said_with_its_table(alone: Cli) -> None:
    alone.conversations(3)
    suite(alone, ALONE.replace("[a]", '[a]\nengine_arguments = ["--latencyy", "1"]'))
    refused = alone("suite", "night.toml", exits=2).stderr.splitlines()[-1]
    assert refused == (
        "turnmill: night.toml: [a] engine sim: unrecognized arguments: --latencyy 1 "
        "(with REDIS_URL, workers elsewhere are used)"
    )


def test_nothing_outlives_a_suite_that_is_killed(alone: Cli) -> None:
    alone.conversations(3)
    suite(alone, ALONE.replace("[a]", '[a]\nengine_arguments = ["--latency", "100"]'))
    process = alone.start("suite", "night.toml")

    def children() -> list[str]:
        found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
        return found.stdout.split()

    until(lambda: len(children()) == 2, "a server and a worker have been started")
    pids = children()
    process.kill()
    process.wait()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "they have ended")
