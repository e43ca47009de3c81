"""Turns that several runs want, and runs that leave theirs: the turn goes on for whoever still wants it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from redis.asyncio import Redis
from tests.batch import HASHING, MODEL, Batch, held, id_of
from tests.processes import SimWorker, ValkeyServer, until_async

from turnmill.client import Client
from turnmill.queue import BATCH_TURNS, Ask, Lane, Queue
from turnmill.reply import Failure, Reply
from turnmill.settings import Farm
from turnmill.store import RunInfo
from turnmill.turn import Message, Sampling, Turn
from turnmill_worker.audit import audit

pytestmark = pytest.mark.faults

Workers = Callable[..., SimWorker]
Clients = Callable[..., Any]

LARGE = 100_000
"""Turns of the run that is cancelled as a whole."""
LONGEST = 500_000
"""Microseconds. Calls take a few milliseconds; one that did all the work at once would take more than a second. What
is between is the machine's, which has other things to do."""


@pytest.fixture
async def client_of(farm: Farm) -> AsyncIterator[Clients]:
    """Makes clients by the name of their run."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(run: str, **options: Any) -> Client:
            options = {"poll_seconds": 0.5, **options}
            client = Client(farm.url, namespace=farm.namespace, run=run, **options)
            return await stack.enter_async_context(client)

        yield make


def shared(content: str) -> Turn:
    message = Message(role="user", content=content)
    return Turn(model=MODEL, messages=[message], sampling=Sampling(temperature=0))


async def counts(client: Client) -> tuple[int, int, int, int]:
    """Of the client's run: total, done, failed, cancelled."""
    (run,) = [info for info in await client.store.runs() if info.name == client.lane.run]
    return run.total, run.done, run.failed, run.cancelled


async def running(client: Client, count: int) -> None:
    async def reached() -> bool:
        return (await client.queue.depth(MODEL)).running == count

    await until_async(reached, f"{count} turns run")


async def clean(client: Client, turns: list[Turn]) -> bool:
    found = await audit(client.store.redis, client.farm.keys, turns, client.lane.run)
    return (found.lost, found.wrong, found.held) == (0, 0, 0)


def kind(ending: Reply | Failure) -> str:
    assert isinstance(ending, Failure), ending
    return ending.kind


async def test_a_running_turn_that_one_run_cancels_goes_on_for_the_other(
    worker: Workers, client_of: Clients
) -> None:
    worker("--slots", "20", sim=(*HASHING, "--latency", "1.5"))
    one, two = await client_of("one"), await client_of("two")
    turns = [shared(f"{i}") for i in range(20)]
    hashes = [turn.hash for turn in turns]
    first = asyncio.gather(*(one.ask(turn) for turn in turns))
    await running(one, 20)
    second = asyncio.gather(*(two.ask(turn) for turn in turns))

    async def both_wait() -> bool:
        return any(info.name == "two" and info.total == 20 for info in await two.store.runs())

    await until_async(both_wait, "both runs wait")
    assert await one.cancel(hashes) == 20
    assert {kind(ending) for ending in await first} == {"cancelled"}
    assert all(isinstance(ending, Reply) for ending in await second)
    # Never given up on the way.
    for hash in hashes:
        trace = await two.trace(hash)
        assert trace is not None
        assert trace.earlier == []
    assert await counts(one) == (20, 0, 0, 20)
    assert await counts(two) == (20, 20, 0, 0)
    assert await clean(two, turns)


async def test_a_turn_whose_first_run_left_outlives_its_worker(
    worker: Workers, client_of: Clients
) -> None:
    doomed = worker("--slots", "20", sim=("--latency", "3600"))
    one, two = await client_of("one"), await client_of("two")
    turns = [shared(f"{i}") for i in range(20)]
    for client in (one, two):
        await client.submit_many(turns)
    await held(one, {await id_of(one, doomed): 20})
    await one.cancel([turn.hash for turn in turns])
    doomed.kill()
    worker("--slots", "20", sim=HASHING)
    endings = await two.wait_many([turn.hash for turn in turns], 30)
    assert all(isinstance(ending, Reply) for ending in endings.values())
    assert await counts(one) == (20, 0, 0, 20)
    assert await counts(two) == (20, 20, 0, 0)
    assert await clean(two, turns)


async def test_a_turn_that_is_wanted_again_while_it_is_given_up_is_answered(
    worker: Workers, client_of: Clients
) -> None:
    worker("--slots", "5", sim=(*HASHING, "--latency", "0.6"))
    one, two = await client_of("one"), await client_of("two")
    turns = [shared(f"{i}") for i in range(5)]
    hashes = [turn.hash for turn in turns]
    await one.submit_many(turns)
    await running(one, 5)
    # All of them are left by the only run that wanted them, and then wanted by another, one by one.
    await one.cancel(hashes)
    asked = []
    for turn in turns:
        asked.append(asyncio.create_task(two.ask(turn)))
        await two.queue.depth(MODEL)
    assert all(isinstance(ending, Reply) for ending in await asyncio.gather(*asked))
    assert await counts(one) == (5, 0, 0, 5)
    assert await counts(two) == (5, 5, 0, 0)
    assert await clean(two, turns)


async def test_the_deadline_of_one_run_is_not_the_others(
    worker: Workers, client_of: Clients
) -> None:
    worker("--slots", "10", sim=(*HASHING, "--latency", "2"))
    hasty, patient = await client_of("hasty", deadline=0.3), await client_of("patient")
    turns = [shared(f"{i}") for i in range(10)]
    waits = asyncio.gather(*(patient.ask(turn) for turn in turns))
    await running(patient, 10)
    assert {kind(ending) for ending in await asyncio.gather(*map(hasty.ask, turns))} == {"deadline"}
    assert not waits.done()
    assert all(isinstance(ending, Reply) for ending in await waits)
    for turn in turns:
        trace = await patient.trace(turn.hash)
        assert trace is not None
        assert trace.earlier == []
    assert await counts(hasty) == (10, 0, 10, 0)
    assert await counts(patient) == (10, 10, 0, 0)
    assert await clean(patient, turns)
    # Asked again, the hasty run finds the answers.
    assert all(isinstance(ending, Reply) for ending in await asyncio.gather(*map(hasty.ask, turns)))
    assert await counts(hasty) == (10, 10, 0, 0)


async def test_when_the_time_of_all_is_up_the_turn_leaves_the_engine(
    worker: Workers, client_of: Clients
) -> None:
    worker("--slots", "1", sim=("--latency", "3600"))
    one, two = await client_of("one", deadline=0.3), await client_of("two", deadline=1.0)
    turn = shared("long")
    endings = await asyncio.gather(one.ask(turn), two.ask(turn))
    assert [kind(ending) for ending in endings] == ["deadline"] * 2
    await running(two, 0)
    assert (await two.queue.depth(MODEL)).queued == 0
    assert await two.store.turn(turn.hash) is None


async def test_a_hundred_thousand_turns_are_cancelled_while_others_are_served(
    worker: Workers, own_valkey: Callable[..., ValkeyServer]
) -> None:
    farm = Farm(own_valkey(appendfsync="no").url)
    redis: Redis = farm.connect()
    async with Client(farm.url, run="other", poll_seconds=0.5) as other:
        hashes = await enqueue_large(redis, farm)
        await redis.config_set("slowlog-log-slower-than", LONGEST)
        await redis.slowlog_reset()
        worker("--slots", "8", sim=(*HASHING, "--latency", "0.02"), farm=farm)

        async def some_are_answered() -> bool:
            return (await large(other)).done > 20

        await until_async(some_are_answered, "the large run is served")
        batch = await Batch.asked(other, (f"other {i}" for i in range(400)))
        assert await Queue(redis, farm.keys).cancel(MODEL, "large") == LARGE

        sweeping, served = f"{farm.keys.queue(MODEL)}sweeping", []

        async def swept() -> bool:
            (run,) = [info for info in await other.store.runs() if info.name == "other"]
            served.append(run.done)
            return not await redis.exists(sweeping)

        await until_async(swept, "the large run is cancelled", 60)
        assert served[-1] > served[0], "others are served meanwhile"
        slow = [
            f"{entry['duration']} us: {entry['command'][:60]!r}"
            for entry in await redis.slowlog_get()
        ]
        assert slow == []
        await batch.answered()
        assert (await batch.audit()).clean
        await running(other, 0)

        run = await large(other)
        assert (run.total, run.failed) == (LARGE, 0)
        assert run.done + run.cancelled == LARGE
        assert run.cancelled > LARGE / 2
        depth = await other.queue.depth(MODEL)
        assert (depth.queued, depth.running, depth.due, depth.suspects) == (0, 0, 0, 0)
        # What nobody wants takes no room; what was answered stays. Those in the engine at the time, too.
        replies = await having(redis, [farm.keys.reply(hash) for hash in hashes])
        assert run.done <= replies <= run.done + 8
        assert await having(redis, [farm.keys.body(hash) for hash in hashes]) == replies

        # The run is not spoiled by it: its turns can be asked for again.
        (again,) = await enqueue_large(redis, farm, 1)
        assert again == hashes[0]
        assert isinstance(await other.wait(again, 30), Reply)
    await redis.aclose(close_connection_pool=True)


async def enqueue_large(redis: Redis, farm: Farm, count: int = LARGE) -> list[str]:
    """The turns of the large run, put into the queue without a Client's waiters. Their hashes."""
    queue, lane = Queue(redis, farm.keys), Lane("large")
    pattern = shared("number").body
    bodies = [pattern.replace(b"number", b"%d" % i) for i in range(count)]
    hashes = [hashlib.sha256(body).hexdigest() for body in bodies]
    assert hashes[0] == shared("0").hash
    for start in range(0, count, BATCH_TURNS):
        part = slice(start, start + BATCH_TURNS)
        asks = [Ask(hash, body) for hash, body in zip(hashes[part], bodies[part], strict=True)]
        await queue.enqueue(MODEL, asks, lane)
    return hashes


async def large(client: Client) -> RunInfo:
    (run,) = [info for info in await client.store.runs() if info.name == "large"]
    return run


async def having(redis: Redis, keys: list[str]) -> int:
    """How many of these keys exist."""
    found = 0
    for start in range(0, len(keys), 5000):
        found += await redis.exists(*keys[start : start + 5000])
    return found
