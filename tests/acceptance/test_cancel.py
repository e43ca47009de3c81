"""`turnmill cancel RUN`: its turns leave queue and engine, its producer ends, other runs get what they want."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest
from tests.acceptance.conftest import Cli
from tests.processes import SimWorker, until

from turnmill.output import read_results
from turnmill.settings import Farm

pytestmark = pytest.mark.faults

Workers = Callable[..., SimWorker]
ENDLESS = ("--latency", "1000")


def status(cli: Cli) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(cli("status", "--json").stdout)
    return found


def counters(cli: Cli, run: str) -> dict[str, Any]:
    (found,) = [one for one in status(cli)["runs"] if one["name"] == run]
    return dict(found)


def cancel(cli: Cli, run: str) -> dict[str, Any]:
    return dict(json.loads(cli("cancel", run, "--json").stdout))


def begin(cli: Cli, source: str, run: str = "r", *options: str) -> Any:
    return cli.start("run", source, "--run", run, "--model", "sim", *options)


def test_running_turns_leave_the_engine_and_the_producer_ends(
    on_farm: Cli, worker: Workers
) -> None:
    first = worker("--served-name", "sim", "--slots", "8", sim=ENDLESS)
    source = str(on_farm.conversations(50))
    process = begin(on_farm, source, "r", "--concurrency", "40", "--json")
    until(lambda: status(on_farm)["queues"].get("sim", {}).get("running") == 8, "turns run")
    until(lambda: counters(on_farm, "r")["total"] == 40, "all are asked")

    said = cancel(on_farm, "r")
    assert said == {"run": "r", "marked": 40, "cancelled": 40, "cleared": True}
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert "The run was cancelled. The same command goes on from here." in err
    assert err.count("nothing more is enqueued") == 1  # and no word of a budget
    assert json.loads(out)["outcomes"] == {
        "completed": 0,
        "capped": 0,
        "failed": 0,
        "cancelled": 40,
    }
    # The engine is empty, though each of its turns would last for a quarter of an hour.
    until(lambda: status(on_farm)["workers"][0]["running"] == 0, "the engine is empty")
    queue = status(on_farm)["queues"]["sim"]
    assert (queue["running"], queue["queued"]) == (0, 0)

    first.kill()
    worker("--served-name", "sim")
    again = json.loads(on_farm("run", source, "--run", "r", "--model", "sim", "--json").stdout)
    assert again["outcomes"]["completed"] == 50
    found = read_results(on_farm.folder / "runs/r/replies.jsonl")
    assert {result.outcome for result in found} == {"completed"}
    assert counters(on_farm, "r")["cancelled"] == 0


def test_what_another_run_wants_goes_on_for_it(on_farm: Cli, worker: Workers) -> None:
    source = str(on_farm.conversations(10, turns=1))  # greedy: shared
    runs = {
        name: begin(on_farm, source, name, "--out", str(on_farm.folder / name))
        for name in ("leaves", "stays")
    }
    for name in runs:
        until(
            lambda name=name: any(
                run["name"] == name and run["total"] == 10 for run in status(on_farm)["runs"]
            ),
            "it has asked",
        )
    assert cancel(on_farm, "leaves")["marked"] == 10
    assert runs["leaves"].wait(30) == 128 + signal.SIGTERM
    worker("--served-name", "sim")
    assert runs["stays"].wait(30) == 0
    assert counters(on_farm, "stays")["done"] == 10
    assert counters(on_farm, "leaves")["done"] == 0


def test_without_a_worker_the_producer_ends_and_nothing_begins(on_farm: Cli) -> None:
    source = str(on_farm.conversations(10))
    process = begin(on_farm, source)
    until(lambda: any(run["total"] == 10 for run in status(on_farm)["runs"]), "it has asked")
    text = " ".join(on_farm("cancel", "r").stdout.split())
    assert text.startswith("run r: its 10 open turns are marked, and none of them will begin")
    assert "no worker of sim lives" in text
    assert process.wait(30) == 128 + signal.SIGTERM
    seen = counters(on_farm, "r")
    assert (seen["cancelled"], seen["done"]) == (10, 0)


def test_the_turns_of_a_run_whose_producer_is_gone(on_farm: Cli, worker: Workers) -> None:
    source = str(on_farm.conversations(10))
    process = begin(on_farm, source)
    until(lambda: any(run["total"] == 10 for run in status(on_farm)["runs"]), "it has asked")
    process.kill()
    process.wait()
    assert cancel(on_farm, "r") == {"run": "r", "marked": 10, "cancelled": 0, "cleared": False}
    worker("--served-name", "sim")
    until(lambda: counters(on_farm, "r")["cancelled"] == 10, "the worker clears them")
    assert counters(on_farm, "r")["done"] == 0
    on_farm("run", source, "--run", "r", "--model", "sim")
    assert counters(on_farm, "r")["done"] == 30


def test_a_run_that_has_ended_has_nothing_to_cancel(on_farm: Cli, worker: Workers) -> None:
    worker("--served-name", "sim")
    source = on_farm.conversations(3)
    on_farm("run", str(source), "--run", "r", "--model", "sim")
    assert on_farm("cancel", "r").stdout == "run r: no turn is open\n"
    assert counters(on_farm, "r")["done"] == 9
    again = on_farm("run", str(source), "--run", "r", "--model", "sim", "--json")
    assert json.loads(again.stdout)["from_store"] == 9


def test_a_run_that_nobody_knows_is_refused(on_farm: Cli, farm: Farm) -> None:
    assert "no run 'r' is known here" in on_farm("cancel", "r", exits=2).stderr
