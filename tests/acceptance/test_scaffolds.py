"""Scaffolds of one's own: effects are done once, told again, and rebuilt where a later one needs them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance.conftest import Cli
from tests.processes import SimWorker, until

STEPS = 4


@pytest.fixture
def first(worker: Callable[..., SimWorker]) -> SimWorker:
    return worker(sim=("--answer", "chain", "--answer-tokens", "3"))


@pytest.fixture
def dice(on_farm: Cli, first: SimWorker) -> Callable[..., tuple[str, ...]]:
    """The arguments of a run; `dice(pause=0.2)`."""
    (on_farm.folder / "sandbox").mkdir()

    def line(*more: str, **options: Any) -> tuple[str, ...]:
        given = {"sandbox": on_farm.folder / "sandbox", "log": on_farm.folder / "log", **options}
        set = [part for name, value in given.items() for part in ("--set", f"{name}={value}")]
        scaffold = "tests.acceptance.dicing:dicing"
        return ("run", "in.jsonl", "--run", "run", "--scaffold", scaffold, *set, *more)

    return line


def results(cli: Cli, name: str = "replies.jsonl") -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (cli.folder / "runs" / "run" / name).read_text().splitlines()
    ]


def throws(cli: Cli) -> Counter[str]:
    log = cli.folder / "log"
    return Counter(log.read_text().splitlines()) if log.exists() else Counter()


def test_effects_are_done_once_and_told_again(on_farm: Cli, dice: Any) -> None:
    on_farm.write([{"id": f"d{i}"} for i in range(6)])
    report = json.loads(on_farm(*dice("--json")).stdout)
    assert report["endings"] == {"thrown": 6}
    assert report["scores"] == {"count": 6, "mean": STEPS / 10}
    first = results(on_farm)
    for result in first:
        assert len(result["details"]["seen"][-1].splitlines()) == STEPS
    report = json.loads(on_farm(*dice("--json")).stdout)
    assert report["asked"] == 0
    assert results(on_farm) == first
    assert set(throws(on_farm).values()) == {1}, "no effect is done again"


def test_a_killed_run_rebuilds_what_it_needs(on_farm: Cli, dice: Any) -> None:
    on_farm.write([{"id": f"d{i}"} for i in range(6)])
    line = dice("--json", "--concurrency", "2", pause=0.1)
    killed = on_farm.start(*line)
    until(lambda: sum(throws(on_farm).values()) >= 9, "some are under way")
    killed.kill()
    killed.communicate()
    ended = results(on_farm, "replies.partial.jsonl")
    before = throws(on_farm)
    # What a sandbox held dies with its process; of what had ended, nothing is needed again.
    for path in (on_farm.folder / "sandbox").iterdir():
        path.unlink()
    on_farm(*line)
    after = results(on_farm)
    assert [result["outcome"] for result in after] == ["completed"] * 6
    for result in after:
        assert len(result["details"]["seen"][-1].splitlines()) == STEPS
        assert "done_again_differently" not in result["details"]
    by_id = {result["id"]: result for result in after}
    assert [by_id[result["id"]] for result in ended] == ended
    # A throw that the crash met in the middle was done again: one for each conversation under way.
    assert sum(throws(on_farm).values()) <= 6 * STEPS + 2
    assert sum(before.values()) >= 9
    for result in ended:
        assert not (on_farm.folder / "sandbox" / result["id"]).exists()


def test_a_cancelled_run_begins_no_effect_more(on_farm: Cli, dice: Any) -> None:
    on_farm.write([{"id": f"d{i}"} for i in range(4)])
    line = dice("--json", pause=2)
    cancelled = on_farm.start(*line)
    until(lambda: len(throws(on_farm)) == 4, "each is in the middle of an effect")
    on_farm("cancel", "run")
    out, err = cancelled.communicate(timeout=30)
    assert cancelled.returncode == 143, err
    assert json.loads(out)["outcomes"]["completed"] == 0
    on_farm(*line)
    assert json.loads((on_farm.folder / "runs/run/report.json").read_text())["endings"] == {
        "thrown": 4
    }
    assert set(throws(on_farm).values()) == {1}, "what was under way was written down"


def test_what_comes_out_differently_is_reported(on_farm: Cli, dice: Any) -> None:
    on_farm.write([{"id": "d0"}])
    line = dice("--json", pause=0.2)
    killed = on_farm.start(*line)
    until(lambda: sum(throws(on_farm).values()) >= 3, "the third step is under way")
    killed.kill()
    killed.communicate()
    said = on_farm(*line, STAMP=" (again)").stderr
    (result,) = results(on_farm)
    differently = result["details"]["done_again_differently"]
    assert set(differently) == {"append"}
    assert "effect append was '0: " in said
    # What is told goes on from what was written down.
    assert "(again)" not in result["details"]["seen"][0]
    assert "(again)" in result["details"]["seen"][-1]


def test_an_answer_that_is_made_anew_has_effects_of_its_own(
    on_farm: Cli, dice: Any, first: SimWorker, worker: Callable[..., SimWorker]
) -> None:
    on_farm.write([{"id": "d0"}])
    on_farm(*dice())
    (before,) = results(on_farm)
    on_farm("forget", before["turns"][0]["hash"], "--yes")
    first.kill()
    worker(sim=("--answer", "chain", "--answer-tokens", "4"))
    on_farm(*dice())
    (after,) = results(on_farm)
    assert after["messages"][1] != before["messages"][1]
    assert after["messages"][2] != before["messages"][2], "what was thrown for another answer"
    assert set(throws(on_farm).values()) == {2}


@pytest.mark.parametrize(
    ("fields", "says"),
    [({"breaks": 1}, "RuntimeError: broken on purpose"), ({"fails": 1}, "as it was told to")],
)
def test_a_scaffold_that_fails_fails_one_conversation(
    on_farm: Cli, dice: Any, fields: dict[str, Any], says: str
) -> None:
    on_farm.write([{"id": "d0"}, {"id": "d1", **fields}])
    out, err = _run(on_farm, dice("--json"))
    # No turn failed for good: nothing is to be asked again.
    assert "1 conversation failed; each line's error says why. The same command tries again." in err
    report = json.loads(out)
    assert report["outcomes"] == {"completed": 1, "capped": 0, "failed": 1, "cancelled": 0}
    assert report["failures"] == {"scaffold": 1}
    assert results(on_farm)[1]["error"] == says


def _run(cli: Cli, line: tuple[str, ...]) -> tuple[str, str]:
    process = cli.start(*line)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out, err


def test_limit_and_shuffle(on_farm: Cli, dice: Any) -> None:
    on_farm.write([{"id": f"d{i}"} for i in range(8)])
    on_farm(*dice("--limit", "3"))
    assert [result["id"] for result in results(on_farm)] == ["d0", "d1", "d2"]
    on_farm(*dice("--limit", "3", "--shuffle", "7", "--extend"))
    chosen = [result["id"] for result in results(on_farm)]
    assert chosen != ["d0", "d1", "d2"]
    on_farm(*dice("--limit", "3", "--shuffle", "7"))
    assert [result["id"] for result in results(on_farm)] == chosen
    changed = on_farm(*dice("--limit", "3", "--shuffle", "8"), exits=2)
    assert "begun with other conversations" in changed.stderr


def test_what_is_no_scaffold(on_farm: Cli) -> None:
    Path(on_farm.folder / "in.jsonl").write_text('{"id": "a", "turns": ["b"]}\n')
    for options, says in (
        (("--scaffold", "none"), "scaffold 'none' is unknown"),
        (("--set", "steps"), "--set 'steps': NAME=VALUE"),
        (("--set", "steps=3"), "takes no options"),
    ):
        assert says in on_farm("run", "in.jsonl", "--run", "r", *options, exits=2).stderr
