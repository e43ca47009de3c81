"""`turnmill drill`: kills that are survived, and a count that would show it if they were not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from redis.asyncio import Redis
from tests.by_hand import ByHand
from tests.processes import ValkeyServer

from turnmill.queue import Ask, Lane
from turnmill.turn import Turn
from turnmill.wire import encode_turn
from turnmill_worker.audit import Audit, audit
from turnmill_worker.drill import DrillReport
from turnmill_worker.engines.sim import history_hash

pytestmark = pytest.mark.faults


def drill(*options: str, exits: int = 0, **environment: str) -> str:
    process = subprocess.run(
        [sys.executable, "-m", "turnmill", "drill", *options],
        env={name: value for name, value in os.environ.items() if name != "REDIS_URL"}
        | environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert process.returncode == exits, process.stderr
    assert "Traceback" not in process.stderr
    return process.stdout + process.stderr * bool(exits)


def test_a_short_drill_loses_nothing(valkey: ValkeyServer) -> None:
    size = ("--turns", "120", "--kills", "3", "--workers", "2", "--lease", "1", "--pause", "1")
    said = drill(*size, "--seed", "7", "--json", REDIS_URL=valkey.url)
    count = json.loads(said.splitlines()[-1])
    assert (count["turns"], count["kills"]) == (120, 3)
    assert [count[name] for name in ("lost", "stored_twice", "wrong", "held")] == [0, 0, 0, 0]
    assert count["re_run"] > 0
    assert count["tokens_made_again"] < count["tokens"]
    assert 0 < count["seconds_to_recover"] < count["seconds"]


async def test_a_drill_leaves_nothing_behind(valkey: ValkeyServer, client: Redis) -> None:
    table = drill("--turns", "5", "--kills", "0", "--workers", "1", REDIS_URL=valkey.url)
    assert "stored twice" in table
    assert [key async for key in client.scan_iter("drill-*")] == []


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--turns", "0"), "--turns"),
        (("--engine", "nonsense"), "--engine"),
        (("--kills", "0", "--workers", "1", "--", "--no-such-option"), "no-such-option"),
    ],
)
def test_wrong_options_are_refused(
    valkey: ValkeyServer, options: tuple[str, ...], what: str
) -> None:
    assert what in drill(*options, exits=2, REDIS_URL=valkey.url)


# The count


def turn(text: str) -> Turn:
    return Turn.model_validate({"model": "m", "messages": [{"role": "user", "content": text}]})


async def count(by_hand: ByHand, *turns: Turn) -> Audit:
    return await audit(by_hand.redis, by_hand.keys, turns, "run")


async def test_what_is_wrong_is_counted(by_hand: ByHand) -> None:
    good, wrong, open_turn = turn("a"), turn("b"), turn("c")
    asks = [Ask(each.hash, encode_turn(each)) for each in (good, wrong, open_turn)]
    await by_hand.queue.enqueue("m", asks, Lane("run"))
    hand = by_hand.hand()
    taken = {claim.hash: claim for claim in (await hand.claim(3)).claims}
    await hand.answer(taken[good.hash], history_hash(good.messages))
    await hand.answer(taken[wrong.hash], "nonsense")
    assert await count(by_hand, good, wrong, open_turn) == Audit(1, 0, 1, 1)
    await by_hand.redis.xadd(by_hand.keys.finished("m"), {"h": good.hash})
    assert await count(by_hand, good) == Audit(0, 1, 0, 1)


def test_any_loss_fails_a_drill() -> None:
    fine = DrillReport(
        turns=1,
        kills=1,
        lost=0,
        stored_twice=0,
        wrong=0,
        held=0,
        re_run=1,
        tokens=1,
        tokens_made_again=1,
        seconds_to_recover=1.0,
        seconds=1.0,
    )
    assert fine.passed
    for name in ("lost", "stored_twice", "wrong", "held"):
        assert not replace(fine, **{name: 1}).passed
