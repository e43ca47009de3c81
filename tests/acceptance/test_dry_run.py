"""`turnmill run --dry-run`: what would be asked, with nothing asked and nothing written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.acceptance.conftest import Cli
from tests.processes import SimWorker, until

from turnmill.scaffolds.vanillux.prompts import DONE, opening
from turnmill.settings import Farm

Workers = Callable[..., SimWorker]


def line(*more: str, name: str = "r") -> tuple[str, ...]:
    return ("run", "in.jsonl", "--run", name, "--model", "sim", *more)


def outlook(cli: Cli, *more: str, name: str = "r") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(cli(*line("--dry-run", "--json", *more, name=name)).stdout)
    return found


def standing(found: dict[str, Any]) -> tuple[int, int, int]:
    """Conversations complete, begun and not begun."""
    return tuple(found["conversations"].values())  # type: ignore[return-value]


def everything(farm: Farm) -> dict[bytes, bytes | None]:
    """All of a farm but what its workers say of themselves, all the time."""
    with redis.Redis.from_url(farm.url) as connection:
        keys = [
            key
            for key in connection.scan_iter(f"{farm.namespace}:*", count=1000)
            if b":worker" not in key and not key.endswith(b":seen")
        ]
        return {key: connection.dump(key) for key in keys}


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_of_a_run_that_was_not_begun(on_farm: Cli, worker: Workers, farm: Farm) -> None:
    worker()
    on_farm.conversations(5)
    before = everything(farm)
    found = outlook(on_farm, "--epochs", "2")
    assert standing(found) == (0, 0, 10)
    # Greedy turns are shared by the epochs: each is asked once.
    assert (found["model"], found["stored"], found["next"], found["queued"]) == ("sim", 0, 5, 0)
    assert everything(farm) == before
    assert not (on_farm.folder / "runs").exists()
    text = on_farm(*line("--dry-run")).stdout
    assert "run r, not driven" in text
    assert "conversations not begun" in text


def test_of_a_run_on_its_way_it_says_what_the_next_attempt_does(
    on_farm: Cli, worker: Workers, farm: Farm
) -> None:
    first = worker("--slots", "2", sim=("--latency", "0.1", "--reject-if", "bad"))
    lines: list[object] = [
        {"id": f"c{i}", "turns": ["bad" if i == 0 else f"number {i}", "go on", "go on"]}
        for i in range(12)
    ]
    on_farm.write(lines)
    options = ("--max-tokens", "1", "--max-failures", "100")
    process = on_farm.start(*line(*options, "--concurrency", "3"))
    partial = on_farm.folder / "runs/r/replies.partial.jsonl"
    until(lambda: partial.exists() and partial.read_bytes().count(b"\n") >= 4, "some have ended")
    process.kill()
    process.wait()
    first.kill()
    before, written = everything(farm), files(on_farm.folder)
    found = outlook(on_farm, *options)
    assert everything(farm) == before
    assert files(on_farm.folder) == written
    complete, begun, not_begun = standing(found)
    assert complete >= 4
    assert begun + not_begun == found["next"] > 0
    assert sum(found["outcomes"].values()) == complete
    assert found["outcomes"]["failed"] == 1
    assert found["failures"] == {"invalid_request": 1}
    # What the killed attempt had asked is in the queue.
    assert 1 <= found["queued"] <= 3

    # A turn that failed for good is asked again on purpose only.
    again = outlook(on_farm, *options, "--again", "failed")
    assert (again["again"], again["failures"]) == (1, {})
    assert standing(again) == (complete - 1, begun, not_begun + 1)
    capped = outlook(on_farm, *options, "--again", "capped-output")
    assert standing(capped)[0] == 1
    assert capped["again"] > 0

    worker(sim=("--reject-if", "bad"))
    report = json.loads(on_farm(*line(*options, "--json")).stdout)
    # The new worker may have answered what was in the queue before the run asked for it.
    assert found["stored"] <= report["from_store"] <= found["stored"] + found["queued"]
    last = outlook(on_farm, *options)
    assert (standing(last), last["next"]) == ((12, 0, 0), 0)
    for key in ("outcomes", "capped", "failures"):
        assert last[key] == report[key]


def test_a_cap_that_a_larger_worker_would_lift(on_farm: Cli, worker: Workers) -> None:
    on_farm.write([{"id": "c", "turns": ["word " * 100, "on"]}])
    small = worker(sim=("--context", "80"))
    on_farm(*line())
    assert outlook(on_farm)["capped"]["context"] == 1
    small.kill()
    worker(sim=("--context", "800"))
    found = outlook(on_farm)
    assert (standing(found), found["again"]) == ((0, 0, 1), 1)


def test_a_run_that_stands_before_an_effect(on_farm: Cli, worker: Workers) -> None:
    worker(sim=("--answer", "chain"))
    on_farm.write([{"id": "d0"}])
    (on_farm.folder / "sandbox").mkdir()
    given = {"sandbox": on_farm.folder / "sandbox", "log": on_farm.folder / "log", "pause": 0.5}
    options = [part for name, value in given.items() for part in ("--set", f"{name}={value}")]
    dicing = line("--scaffold", "tests.acceptance.dicing:dicing", *options)
    log = on_farm.folder / "log"
    process = on_farm.start(*dicing)
    until(lambda: log.exists() and len(log.read_text().splitlines()) == 2, "its second throw")
    process.kill()
    process.wait()
    found = json.loads(on_farm(*dicing, "--dry-run", "--json").stdout)
    assert (standing(found), found["stored"], found["next"]) == ((0, 1, 0), 2, 0)
    assert found["effects"] == 1
    assert len(log.read_text().splitlines()) == 2


def test_no_sandbox_is_started(on_farm: Cli, worker: Workers) -> None:
    """Of vanillux: neither for what is complete, nor for what is on its way, nor for what was not begun."""
    folder = on_farm.folder
    done, started = folder / "done", folder / "started"
    shell = folder / "bin" / "bash"
    shell.parent.mkdir()
    shell.write_text(f'#!/bin/sh\necho . >> {started}\nexec {shutil.which("bash")} "$@"\n')
    shell.chmod(0o755)
    (temporary := folder / "tmp").mkdir()
    environment = {"PATH": f"{shell.parent}:{os.environ['PATH']}", "TMPDIR": str(temporary)}
    task = {"id": "v", "prompt": "Do it", "files": {"a": "b"}, "check": f"echo check >> {done}"}
    on_farm.write([task])
    commands = [f"echo one >> {done}", f"echo two >> {done}", f"echo {DONE}"]
    calls = [{"name": "bash", "arguments": {"command": command}} for command in commands]
    said = opening("Do it", seconds=120, most=10_000, steps=64)[1].content
    answers = [{"tool_calls": [call]} for call in calls]
    (folder / "play").write_text(json.dumps({"users": [said], "answers": answers}))
    worker(sim=("--play", str(folder / "play")))
    given = ("sandbox=local", "unsafe_local=true")
    options = [part for one in given for part in ("--set", one)]
    vanillux = line("--scaffold", "vanillux", *options, "--json")

    def look() -> tuple[tuple[int, int, int], int, int]:
        found = json.loads(on_farm(*vanillux, "--dry-run", **environment).stdout)
        assert not list(temporary.iterdir())
        return standing(found), found["next"], found["effects"]

    assert look() == ((0, 0, 1), 1, 0)
    assert not started.exists()
    assert json.loads(on_farm(*vanillux, **environment).stdout)["scores"]["mean"] == 1.0
    assert done.read_text() == "one\ntwo\ncheck\n"
    before = started.read_bytes()
    assert before
    assert look() == ((1, 0, 0), 0, 0)
    (result,) = map(json.loads, (folder / "runs/r/replies.jsonl").read_text().splitlines())
    on_farm("forget", result["turns"][1]["hash"], "--yes")
    assert look() == ((0, 1, 0), 1, 0)
    assert started.read_bytes() == before
    assert done.read_text() == "one\ntwo\ncheck\n"


def test_without_a_farm_no_worker_is_started(alone: Cli) -> None:
    alone.conversations(3)
    plain = ("run", "in.jsonl", "--run", "r", "--engine", "sim")
    unknown = json.loads(alone(*plain, "--dry-run", "--json").stdout)
    assert (unknown["model"], standing(unknown)) == (None, (0, 0, 3))
    assert "not known yet" in alone(*plain, "--dry-run").stdout
    alone(*plain, "--served-name", "mine")
    (alone.folder / "runs/r/worker.log").unlink()
    found = json.loads(alone(*plain, "--dry-run", "--json").stdout)
    assert (found["model"], standing(found)) == ("mine", (3, 0, 0))
    assert not (alone.folder / "runs/r/worker.log").exists()
    refused = alone(*plain, "--served-name", "other", "--dry-run", exits=2).stderr
    assert "was begun with other model" in refused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--seed", "1"], "run 'r' was begun with other seed"),
        (["--shuffle", "1"], "run 'r' was begun with other conversations"),
        (["--max-failures", "x"], "max-failures 'x'"),
        (["--run", "s", "--out", "runs/r"], "holds the files of run 'r'"),
    ],
)
def test_what_the_run_refuses_is_refused(
    on_farm: Cli, worker: Workers, options: list[str], says: str
) -> None:
    worker()
    on_farm.conversations(8)
    on_farm(*line())
    for more in ((), ("--dry-run",)):
        assert says in on_farm(*line(), *options, *more, exits=2).stderr
    assert standing(outlook(on_farm, "--seed", "1", "--extend")) == (8, 0, 0)


def test_bad_lines_are_refused(on_farm: Cli) -> None:
    (on_farm.folder / "in.jsonl").write_text("{}\n")
    assert "in.jsonl:1: id: is missing" in on_farm(*line("--dry-run"), exits=2).stderr
