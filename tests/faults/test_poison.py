"""Poison convicts the guilty: a turn that kills its workers is found, and innocents that died with it are not.

Workers are started again by a supervisor, as they would be in a farm.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from tests.batch import HASHING, MODEL, Batch, held, id_of
from tests.processes import SimWorker

from turnmill.client import Client
from turnmill.reply import Failure
from turnmill.settings import Farm
from turnmill.turn import Message, Turn

pytestmark = pytest.mark.faults

Workers = Callable[..., SimWorker]

KILLER = Turn(model=MODEL, messages=[Message(role="user", content="death")])
FOR_EVER = ("--latency", "100000")


@pytest.fixture
async def client(farm: Farm) -> AsyncIterator[Client]:
    async with Client(farm.url, namespace=farm.namespace, run="run", poll_seconds=1.0) as client:
        yield client


@contextlib.asynccontextmanager
async def supervised(start: Callable[[], SimWorker], count: int) -> AsyncIterator[list[SimWorker]]:
    """So many workers, started again whenever one dies. Gives those that have died."""
    dead: list[SimWorker] = []

    async def supervise() -> None:
        running = [start() for _ in range(count)]
        while True:
            for place, one in enumerate(running):
                if one.process.poll() is not None:
                    dead.append(one)
                    running[place] = start()
            await asyncio.sleep(0.02)

    supervisor = asyncio.create_task(supervise())
    try:
        yield dead
    finally:
        supervisor.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await supervisor


async def marks(client: Client) -> set[str]:
    """In which company turns run now."""
    owners = await client.store.redis.hvals(client.farm.keys.owners(MODEL))  # type: ignore[misc]
    return {owner[24:25].decode() for owner in owners}


async def test_a_turn_that_kills_each_worker_is_convicted_and_the_200_beside_it_end_well(
    worker: Workers, client: Client
) -> None:
    def start() -> SimWorker:
        return worker(
            *("--slots", "50"),
            sim=(*HASHING, "--kill-if", "death", "--latency", "0.05"),
            registers=False,
        )

    before = await Batch.asked(client, (f"before {i}" for i in range(100)))
    await client.submit(KILLER)
    after = await Batch.asked(client, (f"after {i}" for i in range(100)))
    async with supervised(start, 2) as dead:
        ending = await client.wait(KILLER.hash, 60)
        assert isinstance(ending, Failure)
        assert ending.kind == "poison"
        await before.answered()
        await after.answered()
        assert 5 <= len(dead) <= 6
        assert ending.tries == len(dead)
        trace = await client.trace(KILLER.hash)
        assert trace is not None
        assert [one.outcome for one in trace.earlier] == ["lapse"] * len(dead)

        # The farm is as it was: nothing waits apart, nothing runs apart.
        depth = await client.queue.depth(MODEL)
        assert (depth.queued, depth.running, depth.suspects) == (0, 0, 0)
        again = await Batch.asked(client, (f"again {i}" for i in range(200)))
        answered = asyncio.create_task(again.answered())
        seen: set[str] = set()
        while not answered.done():
            seen |= await marks(client)
        await answered
        assert seen <= {"-"}
        assert all(trace.earlier == [] for trace in await again.traces())
        for batch in (before, after, again):
            assert (await batch.audit()).clean
        assert await client.ask(KILLER) == ending
        assert len(dead) <= 6


async def test_four_kills_in_a_row_convict_nobody_and_leave_nothing_to_run_alone(
    worker: Workers, client: Client
) -> None:
    batch = await Batch.asked(client, (f"innocent {i}" for i in range(100)))
    # Two workers full of them; two that have just begun with some of them on trial.
    for count in (100, 100, 25, 25):
        doomed = worker("--slots", "100", sim=(*HASHING, *FOR_EVER))
        await held(client, {await id_of(client, doomed): count})
        doomed.kill()

    worker("--slots", "100", sim=(*HASHING, "--latency", "0.05"))
    seen: set[str] = set()
    answered = asyncio.create_task(batch.answered())
    while not answered.done():
        seen |= await marks(client)
    await answered
    assert "!" not in seen
    assert (await batch.audit()).clean
    tries = [len(trace.earlier) for trace in await batch.traces()]
    assert sorted(tries) == [2] * 50 + [3] * 50


async def test_who_lives_through_its_trial_gets_company_again(
    worker: Workers, client: Client, farm: Farm
) -> None:
    lonely = await Batch.asked(client, ["lonely"])
    for _ in range(2):
        doomed = worker("--slots", "2", sim=FOR_EVER)
        await held(client, {await id_of(client, doomed): 1})
        doomed.kill()
    one = await id_of(client, worker("--slots", "2", sim=FOR_EVER))
    await held(client, {one: 1})
    await Batch.asked(client, ["another"])
    assert (await client.queue.depth(MODEL)).queued == 1
    # Its trial's time has passed.
    await client.store.redis.delete(f"{farm.keys.queue(MODEL)}trial:{one}")
    await held(client, {one: 2})
    assert await marks(client) == {"!", "-"}
    assert await lonely.client.result(lonely.hashes[0]) is None
