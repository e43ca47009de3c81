"""`turnmill run --epochs`, `--reuse`, `--again`: which answers are asked, shared, and asked again."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import redis
from tests.acceptance.conftest import Cli
from tests.processes import SimWorker, ValkeyServer, until

from turnmill.output import read_results
from turnmill.results import ConversationResult
from turnmill.settings import Farm

Workers = Callable[..., SimWorker]

WORDS = ("--answer", "words", "--answer-tokens", "6")


def run(cli: Cli, *options: str, name: str = "r", exits: int = 0) -> dict[str, Any]:
    """The report of `turnmill run` on the folder's input."""
    line = ("run", "in.jsonl", "--run", name, "--model", "sim", "--json", *options)
    report: dict[str, Any] = json.loads(cli(*line, exits=exits).stdout)
    return report


def results(cli: Cli, name: str = "r") -> list[ConversationResult]:
    return read_results(cli.folder / "runs" / name / "replies.jsonl")


def hashes(cli: Cli, name: str = "r") -> list[str]:
    return [turn.hash for result in results(cli, name) for turn in result.turns]


def asked(report: dict[str, Any]) -> tuple[int, int]:
    return report["asked"], report["from_store"]


# Epochs


def test_each_conversation_is_held_once_an_epoch(on_farm: Cli, worker: Workers) -> None:
    worker("--served-name", "sim")
    on_farm.write([{"id": f"c{i}", "turns": ["hello", "again"]} for i in range(3)])
    first = run(on_farm, "--epochs", "4")
    assert first["outcomes"]["completed"] == 12
    assert asked(first) == (24, 0)
    found = [(result.id, result.epoch) for result in results(on_farm)]
    assert found == [(f"c{i}", epoch) for i in range(3) for epoch in range(4)]
    assert len(set(hashes(on_farm))) == 24
    assert asked(run(on_farm, "--epochs", "4")) == (0, 24)


def test_more_epochs_are_another_run_unless_it_is_extended(on_farm: Cli, worker: Workers) -> None:
    worker("--served-name", "sim")
    on_farm.write([{"id": "c", "turns": ["hello"]}])
    run(on_farm)
    before = hashes(on_farm)
    line = ("run", "in.jsonl", "--run", "r", "--model", "sim", "--epochs", "3")
    assert "was begun with other epochs" in on_farm(*line, exits=2).stderr
    assert asked(run(on_farm, "--epochs", "3", "--extend")) == (2, 1)
    assert hashes(on_farm)[:1] == before


def test_what_all_may_share_is_asked_once_for_all_epochs(on_farm: Cli, worker: Workers) -> None:
    worker("--served-name", "sim", sim=("--latency", "0.05"))
    sampling = {"temperature": 0}
    on_farm.write([{"id": "c", "turns": ["hello", "again"], "sampling": sampling}])
    report = run(on_farm, "--epochs", "3")
    assert asked(report) == (2, 4)
    assert report["outcomes"]["completed"] == 3
    assert len(set(hashes(on_farm))) == 2
    assert [result.epoch for result in results(on_farm)] == [0, 1, 2]


def test_seeds_differ_by_epoch_and_are_found_again(on_farm: Cli, worker: Workers) -> None:
    worker("--served-name", "sim")
    on_farm.write([{"id": "c", "turns": ["hello"]}])
    assert asked(run(on_farm, "--epochs", "3", "--seed", "7")) == (3, 0)
    assert len(set(hashes(on_farm))) == 3
    assert asked(run(on_farm, "--epochs", "3", "--seed", "7")) == (0, 3)


def test_a_failure_that_epochs_share_is_met_once_and_fails_them_all(
    on_farm: Cli, worker: Workers
) -> None:
    worker("--served-name", "sim", sim=("--reject-if", "bad"))
    on_farm.write([{"id": "c", "turns": ["bad"], "sampling": {"temperature": 0}}])
    line = ("--epochs", "3", "--concurrency", "1")
    report = run(on_farm, *line, "--max-failures", "2", exits=1)
    assert asked(report) == (1, 2)
    assert report["outcomes"]["failed"] == 3
    assert asked(run(on_farm, *line, "--max-failures", "3")) == (0, 3)
    assert asked(run(on_farm, *line, "--max-failures", "3", "--again", "failed")) == (1, 2)


# Draws of many runs


def test_runs_that_reuse_draws_share_them(on_farm: Cli, worker: Workers) -> None:
    worker("--served-name", "sim")
    on_farm.write([{"id": "c", "turns": ["hello"]}])
    assert asked(run(on_farm, name="own")) == (1, 0)
    assert asked(run(on_farm, "--reuse", "all", "--epochs", "2", name="one")) == (2, 0)
    assert asked(run(on_farm, "--reuse", "all", name="two")) == (0, 1)
    assert asked(run(on_farm, "--reuse", "run", name="three")) == (1, 0)
    line = ("run", "in.jsonl", "--run", "two", "--model", "sim")
    assert "was begun with other reuse" in on_farm(*line, exits=2).stderr


# What is stored, asked again


def test_replies_that_met_their_own_cap_are_asked_again_once(on_farm: Cli, worker: Workers) -> None:
    """Also where conversations share one, at the same time or one after the other."""
    worker("--served-name", "sim", sim=(*WORDS, "--latency", "0.05"))
    capped = {"temperature": 0, "max_tokens": 4}
    lines: list[object] = [
        {"id": f"c{i}", "turns": ["same", f"{i}"], "sampling": capped} for i in range(5)
    ]
    on_farm.write([*lines, {"id": "whole", "turns": ["other"], "sampling": {"temperature": 0}}])
    assert asked(run(on_farm)) == (1 + 5 + 1, 4)
    assert asked(run(on_farm)) == (0, 11)
    for concurrency in ("1", "16"):
        report = run(on_farm, "--again", "capped-output", "--concurrency", concurrency)
        assert asked(report) == (6, 5)
        assert report["capped"]["output"] == 10
    assert asked(run(on_farm, "--again", "capped-context", "--again", "failed")) == (0, 11)


def test_a_context_cap_is_asked_again_where_there_is_a_larger_context(
    on_farm: Cli, worker: Workers
) -> None:
    on_farm.write(
        [
            {"id": "short", "turns": ["hello"], "sampling": {"temperature": 0}},
            {"id": "long", "turns": ["hello", "word " * 100, "on"], "sampling": {"temperature": 0}},
            {"id": "huge", "turns": ["word " * 900], "sampling": {"temperature": 0}},
        ]
    )
    small = worker("--served-name", "sim", sim=(*WORDS, "--context", "80"))
    report = run(on_farm)
    assert (asked(report), report["capped"]["context"]) == ((3, 1), 2)
    assert asked(run(on_farm)) == (0, 4)  # no larger one lives
    assert asked(run(on_farm, "--again", "capped-context")) == (2, 2)
    small.kill()

    larger = worker("--served-name", "sim", sim=(*WORDS, "--context", "800"))
    report = run(on_farm)
    # The long one goes on with its third turn; the huge one does not fit here either, and is not asked.
    assert (asked(report), report["capped"]["context"]) == ((2, 3), 1)
    by_id = {result.id: result for result in results(on_farm)}
    assert [len(by_id[id].turns) for id in ("short", "long", "huge")] == [1, 3, 1]
    assert asked(run(on_farm)) == (0, 5)
    larger.kill()

    worker("--served-name", "sim", sim=(*WORDS, "--context", "80"))
    assert asked(run(on_farm)) == (0, 5)  # what a larger one answered stays


def test_a_context_cap_is_asked_again_at_most_once_an_attempt(
    on_farm: Cli, worker: Workers
) -> None:
    """A worker with a larger context lives, but it is busy, and the one that has the smaller takes the turn again."""
    line = {"turns": ["word " * 100], "sampling": {"temperature": 0}}
    on_farm.write([{"id": "c", **line}, {"id": "d", **line}])
    small = worker("--served-name", "sim", sim=("--context", "80"))
    assert asked(run(on_farm)) == (1, 1)
    small.kill()
    worker("--served-name", "sim", "--slots", "1", sim=("--context", "800", "--latency", "1000"))
    on_farm.write([{"id": "busy", "turns": ["hello"]}], "busy.jsonl")
    on_farm.start("run", "busy.jsonl", "--run", "busy", "--model", "sim")

    def is_busy() -> bool:
        queues = json.loads(on_farm("status", "--json").stdout)["queues"]
        return bool(queues and queues["sim"]["running"])

    until(is_busy, "the larger one is busy")
    worker("--served-name", "sim", sim=("--context", "80"))
    report = run(on_farm)
    assert (asked(report), report["outcomes"]["capped"]) == ((1, 1), 2)


def test_who_may_not_remove_replies_goes_on_with_them(
    make_cli: Callable[..., Cli], own_valkey: Callable[..., ValkeyServer], worker: Workers
) -> None:
    """Unless it was said on purpose. And nothing is done by halves: what another run holds it still holds."""
    server = own_valkey()
    with redis.Redis.from_url(server.url) as admin:
        rules = ["on", ">word", "allkeys", "allcommands", "resetkeys"]
        rules += [
            "~turnmill:[^rx]*",
            "~turnmill:run*",
            "%R~turnmill:r:*",
            "%R~turnmill:x:*",
            "~turnmill:",
        ]
        admin.execute_command("ACL", "SETUSER", "producer", *rules)
    cli = make_cli(Farm(f"unix://producer:word@{server.socket}"))
    cli.write([{"id": "c", "turns": ["word " * 100], "sampling": {"temperature": 0}}])
    small = worker("--served-name", "sim", sim=("--context", "80"), farm=Farm(server.url))
    for name in ("r", "other"):
        run(cli, name=name)
    small.kill()
    worker("--served-name", "sim", sim=("--context", "800"), farm=Farm(server.url))
    line = ("run", "in.jsonl", "--run", "r", "--model", "sim", "--json")
    kept = cli(*line)
    assert asked(json.loads(kept.stdout)) == (0, 1)
    assert kept.stderr.count("replies that met a smaller context are kept: Redis refuses") == 1
    assert "Redis refuses" in cli(*line, "--again", "capped-context", exits=3).stderr
    runs = {one["name"]: one for one in json.loads(cli("status", "--json").stdout)["runs"]}
    assert [(one["total"], one["done"]) for one in runs.values()] == [(1, 1), (1, 1)]


def test_an_unknown_ending_is_refused(on_farm: Cli) -> None:
    on_farm.write([{"id": "c", "turns": ["hello"]}])
    line = ("run", "in.jsonl", "--run", "r", "--model", "sim", "--again", "completed")
    refused = on_farm(*line, exits=2).stderr
    assert "'completed' is not one of 'capped-context', 'capped-output', 'failed'" in refused
    assert not (on_farm.folder / "runs").exists()
