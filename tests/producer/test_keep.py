"""`--keep`: answers that go by themselves, when the run that has made them is over for long enough."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
import redis
from tests.acceptance.conftest import Cli
from tests.by_hand import LONG_AGO, ByHand, h
from tests.processes import SimWorker, until

from turnmill.errors import UsageError
from turnmill.holdings import Holdings
from turnmill.settings import Farm, parse_duration

Workers = Callable[..., SimWorker]


@pytest.fixture
def holdings(by_hand: ByHand) -> Holdings:
    return Holdings(by_hand.redis, by_hand.keys, patience=5.0)


async def time_is_up(hand: ByHand, run: str = "run") -> None:
    await hand.redis.zadd(hand.keys.expiring, {run: LONG_AGO})


async def upkeep(hand: ByHand) -> int:
    """What workers do, as often as it is to be done. Returns how often."""
    calls = 1
    while (await hand.hand().renew())[2]:
        calls += 1
        assert calls < 100
    return calls


@pytest.mark.parametrize(
    ("text", "seconds"), [("1s", 1), ("90s", 90), ("30m", 1800), ("12h", 43200), ("7d", 604800)]
)
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "7", "0d", "-1d", "1.5h", "7 d", "7w", "7d ", "٧d", "9999999d"]
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(UsageError, match=f"duration {re.escape(repr(text))}"):
        parse_duration(text)


async def test_a_run_is_forgotten_when_its_time_is_up(by_hand: ByHand, holdings: Holdings) -> None:
    worker = by_hand.hand()
    await by_hand.enqueue(*(f"t{i}" for i in range(450)))
    await by_hand.enqueue("t0", "t1", run="other")
    for claim in (await worker.claim(450)).claims:
        await worker.answer(claim)
    await by_hand.redis.hset(by_hand.keys.journal("run"), "effect", "17")
    await holdings.keep("run", 3600)
    await upkeep(by_hand)
    assert await by_hand.counts() == (450, 450, 0, 0)
    assert await by_hand.redis.exists(by_hand.keys.journal("run"))
    await time_is_up(by_hand)
    assert await upkeep(by_hand) > 450 / 200  # a bounded number of turns a call
    assert [info.name for info in await by_hand.store.runs()] == ["other"]
    assert await by_hand.counts("other") == (2, 2, 0, 0)
    left = [key async for key in by_hand.redis.scan_iter(f"{by_hand.farm.namespace}:[brx]:*")]
    assert len(left) == 2 * 3
    assert not await by_hand.redis.exists(by_hand.keys.expiring, by_hand.keys.journal("run"))


async def test_who_asks_for_more_is_not_over(by_hand: ByHand, holdings: Holdings) -> None:
    worker = by_hand.hand()
    await by_hand.enqueue("a")
    await worker.answer(await worker.take_one("a"))
    await holdings.keep("run", 0.001)
    await by_hand.enqueue("b")
    await upkeep(by_hand)
    assert await by_hand.counts() == (2, 1, 0, 0)
    await worker.take_one("b")
    # Nor is who waits, whatever was noted.
    await time_is_up(by_hand)
    await upkeep(by_hand)
    assert h("b") in {
        raw.decode() for raw in await by_hand.redis.smembers(by_hand.keys.turns("m", "run"))
    }
    assert not await by_hand.redis.exists(by_hand.keys.expiring)


async def test_a_run_that_is_driven_is_not_over(by_hand: ByHand) -> None:
    worker = by_hand.hand()
    await by_hand.enqueue("a")
    await worker.answer(await worker.take_one("a"))
    await by_hand.redis.set(by_hand.keys.producer("run"), "somebody")
    await time_is_up(by_hand)
    await upkeep(by_hand)
    assert await by_hand.counts() == (1, 1, 0, 0)
    await by_hand.redis.delete(by_hand.keys.producer("run"))
    await time_is_up(by_hand)
    await upkeep(by_hand)
    assert not await by_hand.store.runs()


async def test_turns_of_a_model_that_nobody_serves_go_too(by_hand: ByHand) -> None:
    other = ByHand(by_hand.redis, by_hand.farm, "other")
    worker = other.hand()
    await other.enqueue("a")
    await worker.answer(await worker.take_one("a"))
    await by_hand.enqueue("b", run="elsewhere")
    await time_is_up(by_hand)
    await upkeep(by_hand)
    assert not await by_hand.redis.exists(by_hand.keys.reply(h("a")))
    assert [info.name for info in await by_hand.store.runs()] == ["elsewhere"]


@pytest.mark.faults
def test_the_option(on_farm: Cli, worker: Workers, farm: Farm) -> None:
    worker("--served-name", "m")
    source = str(on_farm.conversations(5))
    line = ("run", source, "--model", "m", "--json", "--run", "r")
    assert "duration '7': " in on_farm(*line, "--keep", "7", exits=2).stderr
    on_farm(*line, "--keep", "7d")
    with redis.Redis.from_url(farm.url) as db:
        seconds, _ = db.time()
        (until_when,) = [
            score for _, score in db.zrange(farm.keys.expiring, 0, -1, withscores=True)
        ]
        assert 0 <= 7 * 86400 + seconds - until_when / 1000 < 60
        # The last command counts.
        assert json.loads(on_farm(*line).stdout)["asked"] == 0
        assert not db.exists(farm.keys.expiring)
        on_farm(*line, "--keep", "1s")
        until(lambda: not db.smembers(farm.keys.runs), "a worker forgets it")
        assert not list(db.scan_iter(f"{farm.namespace}:[brx]:*"))
    assert json.loads(on_farm(*line).stdout)["asked"] == 15
