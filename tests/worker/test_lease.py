"""The lease keeper: a thread that renews what is held, says that the worker lives, and what it has lost."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.by_hand import ByHand, Hand, h
from tests.processes import ValkeyServer, until, until_async

from turnmill.reply import EngineIdentity
from turnmill.settings import Farm
from turnmill.store import WorkerInfo
from turnmill_worker.lease import Held, LeaseKeeper

LEASE = 0.4


class Keeping:
    """A keeper for what a hand holds, and what it has said."""

    def __init__(self, farm: Farm, hand: Hand) -> None:
        self.alive = True
        self.lost: list[str] = []
        self.unwanted: list[str] = []
        self.hand = hand
        self.keeper = LeaseKeeper(
            farm,
            "m",
            LEASE,
            held=lambda: [(claim.hash, claim.token) for claim in list(hand.held.values())],
            info=self.info,
            alive=lambda: self.alive,
            renewed=self.renewed,
        )
        self.keeper.start()

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            id=self.hand.id,
            host="here",
            pid=os.getpid(),
            model="m",
            engine=EngineIdentity(engine="none", version="1", model="m"),
            slots=1,
            context=1,
            running=len(self.hand.held),
            state="serving",
            started=0,
            heartbeat=time.time(),
        )

    def renewed(self, lost: Held, unwanted: Held) -> None:
        assert threading.current_thread() is self.keeper
        for claims, into in ((lost, self.lost), (unwanted, self.unwanted)):
            for hash, token in claims:
                assert self.hand.held[hash].token == token
                into.append(hash)

    def stop(self) -> None:
        self.keeper.stop()
        self.keeper.join(10)
        assert not self.keeper.is_alive()


@pytest.fixture
def keep() -> Iterator[Callable[..., Keeping]]:
    kept: list[Keeping] = []

    def start(by_hand: ByHand, hand: Hand) -> Keeping:
        kept.append(Keeping(by_hand.farm, hand))
        return kept[-1]

    yield start
    for one in kept:
        one.stop()


@pytest.fixture(autouse=True)
async def short_lease(by_hand: ByHand) -> None:
    await by_hand.redis.set(by_hand.keys.lease, int(LEASE * 1000))


async def lease_of(by_hand: ByHand, name: str) -> float:
    return float(await by_hand.redis.zscore(by_hand.keys.leases("m"), h(name)) or 0)


async def test_what_is_held_stays_held_although_the_loop_is_blocked(
    by_hand: ByHand, keep: Callable[..., Keeping]
) -> None:
    await by_hand.enqueue("a")
    hand = by_hand.hand()
    claim = await hand.take_one("a")
    keeping = keep(by_hand, hand)
    time.sleep(3 * LEASE)  # noqa: ASYNC251 this loop stands still, as a busy worker's would
    assert not (await by_hand.hand().claim()).claims
    assert await by_hand.strikes("a") == 0
    assert keeping.lost == []
    assert await hand.answer(claim) == 1


async def test_what_is_lost_or_unwanted_is_said(
    by_hand: ByHand, keep: Callable[..., Keeping]
) -> None:
    await by_hand.enqueue("a", "b", "c")
    hand = by_hand.hand()
    a, _, _ = await hand.take("a", "b", "c")
    await by_hand.lapse(a.hash)
    await by_hand.hand().take_one("a")
    await by_hand.cancel("b")
    keeping = keep(by_hand, hand)
    await asyncio.to_thread(until, lambda: keeping.lost and keeping.unwanted)
    assert set(keeping.lost) == {h("a")}
    assert set(keeping.unwanted) == {h("b")}


async def test_the_worker_is_registered_and_signs_off(
    by_hand: ByHand, keep: Callable[..., Keeping]
) -> None:
    hand = by_hand.hand()
    keeping = keep(by_hand, hand)
    await until_async(by_hand.store.workers)
    (info,) = await by_hand.store.workers()
    assert (info.id, info.model) == (hand.id, "m")
    await asyncio.to_thread(keeping.stop)
    assert not await by_hand.store.workers()
    assert not await by_hand.redis.exists(by_hand.keys.worker(hand.id))


async def test_a_worker_that_vanishes_is_gone_from_the_list(by_hand: ByHand) -> None:
    await by_hand.redis.sadd(by_hand.keys.workers, "vanished")
    assert await by_hand.store.workers() == []
    assert not await by_hand.redis.smembers(by_hand.keys.workers)


async def test_without_a_living_engine_nothing_is_renewed(
    by_hand: ByHand, keep: Callable[..., Keeping]
) -> None:
    await by_hand.enqueue("a")
    hand, other = by_hand.hand(), by_hand.hand()
    await hand.take_one("a")
    keeping = keep(by_hand, hand)
    keeping.alive = False

    async def taken() -> bool:
        return bool((await other.claim()).claims)

    await until_async(taken)
    assert await by_hand.strikes("a") == 1
    # It still says that it lives, and why it holds nothing is seen in `status`.
    assert [info.id for info in await by_hand.store.workers()] == [hand.id]


async def test_who_holds_nothing_keeps_the_queue_in_order(
    by_hand: ByHand, keep: Callable[..., Keeping]
) -> None:
    await by_hand.enqueue(*(f"t{i}" for i in range(450)))
    await by_hand.enqueue("late", run="hasty", deadline=0.001)
    await by_hand.cancel()
    keep(by_hand, by_hand.hand())

    async def in_order() -> bool:
        cancelled, late = await by_hand.counters(), await by_hand.counters("hasty")
        return (cancelled.cancelled, late.failed) == (450, 1)

    await until_async(in_order)


async def test_it_goes_on_when_redis_has_been_away(
    own_valkey: Callable[..., ValkeyServer], keep: Callable[..., Keeping]
) -> None:
    server = own_valkey(appendfsync="always")
    farm = Farm(server.url)
    redis = farm.connect()
    by_hand: Any = ByHand(redis, farm)
    await redis.set(farm.keys.lease, int(LEASE * 1000))
    await by_hand.enqueue("a")
    hand = by_hand.hand()
    claim = await hand.take_one("a")
    keeping = keep(by_hand, hand)
    await until_async(by_hand.store.workers)
    runs_out = await lease_of(by_hand, "a") / 1000 + LEASE
    server.kill()
    await asyncio.to_thread(until, lambda: time.time() > runs_out)
    server.start()
    await redis.connection_pool.disconnect()

    async def renewed() -> bool:
        return await lease_of(by_hand, "a") > await by_hand.now()

    await until_async(renewed)
    assert await by_hand.strikes("a") == 0
    assert keeping.lost == []
    assert await hand.answer(claim) == 1
    await redis.aclose(close_connection_pool=True)
