"""Whatever a scaffold does, it ends its own conversation: the others go on, and a line says what was wrong."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import redis
from tests.acceptance.conftest import Cli
from tests.acceptance.hostile import ALL
from tests.processes import SimWorker, until

from turnmill.settings import Farm

FAILED = {
    "no_messages": "the scaffold's Ended: messages: ",
    "capped": "the scaffold's Ended: capped: ",
    "nan": "the scaffold's Ended: score: Input should be a finite number",
    "score": "the scaffold's Ended: score: ",
    "ending": "the scaffold's Ended: ending: ",
    "details": "the scaffold's Ended: details: ",
    "bytes": "the scaffold's Ended: ",
    "object": "the scaffold's Ended: ",
    "circle": "the scaffold's Ended: ",
    "nothing": "the scaffold returned NoneType, and not Ended",
    "exits": "RuntimeError: SystemExit: 0",
    "cancels_itself": "CancelledError:",
    "own_base_exception": "Own: mine",
    "value": "ValueError: invalid literal",
    "raises_half_a_pair": "RuntimeError: file \ufffd",
    "asks_nothing": "cannot be asked: messages: Field required",
    "group": "turn ",
    "effect_object": "effect 'look' must return JSON: ",
    "effect_key": "the key of an effect must be a string: None",
    "effect_sync": "effect 'look' is not async: it returned int",
    "effect_twice": "the effect 'look' is asked for twice after one turn",
    "effect_in_effect": "the effect 'inner' is within another, 'outer'",
}
ENDLESS = {"blocks", "never_gives_up"}


def line(*more: str) -> tuple[str, ...]:
    scaffold = ("--scaffold", "tests.acceptance.hostile:hostile", "--max-failures", "100%")
    return ("run", "in.jsonl", "--run", "run", *scaffold, "--json", *more)


def results(cli: Cli) -> dict[str, dict[str, Any]]:
    text = (cli.folder / "runs/run/replies.jsonl").read_text()
    return {result["id"]: result for result in map(json.loads, text.splitlines())}


def test_each_ends_its_own_conversation(on_farm: Cli, worker: Callable[..., SimWorker]) -> None:
    worker(sim=("--reject-if", "REFUSED"))
    on_farm.write([{"id": how, "how": how} for how in ALL if how not in ENDLESS])
    out, err = run(on_farm)
    found = results(on_farm)
    failed = {id: one["error"] for id, one in found.items() if one["outcome"] == "failed"}
    assert failed.keys() == FAILED.keys()
    for how, says in FAILED.items():
        assert failed[how].startswith(says), how
    assert "invalid_request" in failed["group"]
    assert 'int("seven")' in err, "where a scaffold broke is in the log"
    assert found["half_a_pair"]["outcome"] == "completed"
    assert found["leaves_a_task"]["ending"] == "left"
    assert json.loads(out)["asked"] < 20, "what a conversation leaves running ends with it"
    assert found["tries_again"]["details"] == {"tries": 3}
    assert found["same_turn"]["details"] == {"seen": [0, 1, 2]}
    # Told again, all of it is the same.
    assert json.loads(run(on_farm)[0])["outcomes"] == json.loads(out)["outcomes"]
    assert results(on_farm)["same_turn"] == found["same_turn"]


def run(cli: Cli) -> tuple[str, str]:
    """Not as `Cli` runs: tracebacks of scaffolds are in the log."""
    process = cli.start(*line())
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out, err


def test_a_cancelled_run_ends_whatever_asks_again(
    on_farm: Cli, worker: Callable[..., SimWorker]
) -> None:
    worker(sim=("--latency", "60"))
    on_farm.write([{"id": "a", "how": "never_gives_up"}])
    process = on_farm.start(*line())

    def under_way() -> bool:
        return bool(json.loads(on_farm("status", "--json").stdout)["runs"])

    until(under_way, "it has asked")
    on_farm("cancel", "run")
    out, err = process.communicate(timeout=30)
    assert process.returncode == 143, err
    assert json.loads(out)["outcomes"]["cancelled"] == 1


def test_an_interrupted_conversation_has_not_ended(
    on_farm: Cli, worker: Callable[..., SimWorker]
) -> None:
    """Whatever its scaffold says to that."""
    first = worker(sim=("--latency", "60"))
    on_farm.write([{"id": "a", "how": "ends_as_if_done"}])
    process = on_farm.start(*line())

    def asks() -> bool:
        found = json.loads(on_farm("status", "--json").stdout)["runs"]
        return bool(found and found[0]["total"])

    until(asks, "it has asked")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert (on_farm.folder / "runs/run/replies.partial.jsonl").read_text() == ""
    first.kill()
    worker()
    run(on_farm)
    assert results(on_farm)["a"]["ending"] == "fine"


def test_a_second_signal_ends_what_blocks(on_farm: Cli, worker: Callable[..., SimWorker]) -> None:
    worker()
    on_farm.write([{"id": "a", "how": "blocks"}])
    process = on_farm.start(*line())
    until((on_farm.folder / "blocks").exists, "it blocks")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) in (130, 143)


def test_what_redis_holds_of_a_run_may_be_garbage(
    on_farm: Cli, farm: Farm, worker: Callable[..., SimWorker]
) -> None:
    worker()
    on_farm.write([{"id": "a", "how": "fine"}])
    run(on_farm)
    with redis.Redis.from_url(farm.url) as connection:
        connection.sadd(farm.keys.engines("run"), b'{"engine": 1}')
        said = on_farm(*line(), exits=3).stderr
        assert "run 'run': an engine that it has met cannot be read: " in said
        for garbage in (b"{", b"[1]", b'{"v":1}'):
            connection.set(farm.keys.manifest("run"), garbage)
            for more in ((), ("--dry-run",)):
                said = on_farm(*line(*more), exits=3).stderr
                assert "the manifest of run 'run' cannot be read: " in said
