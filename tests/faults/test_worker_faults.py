"""Workers that are killed, stopped, blocked, stuck and told to end: each turn is answered, once, by who may."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable

import pytest
from tests.batch import HASHING, Batch, held, holders, id_of, says
from tests.processes import SimWorker, until_async

from turnmill.client import Client
from turnmill.reply import Trace
from turnmill.settings import Farm

WorkerFactory = Callable[..., SimWorker]

pytestmark = pytest.mark.faults

LEASE = 1.0
"""Seconds; the fixture's."""


@pytest.fixture
async def asking(farm: Farm) -> AsyncIterator[Client]:
    async with Client(farm.url, namespace=farm.namespace, run="run") as client:
        yield client


def numbered(name: str, count: int) -> list[str]:
    return [f"{name} {i}" for i in range(count)]


def earlier(trace: Trace) -> list[str]:
    return [one.outcome for one in trace.earlier]


# Killed


async def test_a_hundred_turns_of_an_hour_run_elsewhere_soon(
    worker: WorkerFactory, asking: Client
) -> None:
    hour = ("--latency", "3600")
    first = worker("--slots", "100", sim=hour)
    batch = await Batch.asked(asking, numbered("long", 100))
    await held(asking, {await id_of(asking, first): 100})
    second = worker("--slots", "100", "--drain", "0", sim=hour)
    everything = {await id_of(asking, second): 100}
    killed = time.monotonic()
    first.kill()
    await held(asking, everything)
    assert time.monotonic() - killed <= LEASE + 1
    second.signal(signal.SIGTERM)
    worker("--slots", "100", sim=HASHING)
    await batch.answered()
    assert (await batch.audit()).clean
    assert {tuple(earlier(trace)) for trace in await batch.traces()} == {("lapse", "drain")}


async def test_eight_random_kills_cost_nothing(worker: WorkerFactory, asking: Client) -> None:
    chance = random.Random(8)

    def start() -> SimWorker:
        return worker("--slots", "50", sim=(*HASHING, "--latency", "0.8"))

    async def done() -> int:
        return next(run.done for run in await asking.store.runs())

    workers = [start() for _ in range(3)]
    batch = await Batch.asked(asking, numbered("turn", 3000))
    hit: list[int] = []
    for _ in range(8):
        goal = await done() + chance.randrange(20, 120)

        async def reached(goal: int = goal) -> bool:
            return await done() >= goal

        await until_async(reached)
        victim = workers.pop(chance.randrange(3))
        id = await id_of(asking, victim)
        hit.append((await holders(asking))[id])
        victim.kill()
        workers.append(start())
    assert sum(hit) > 100, "the kills hit turns"
    await batch.answered()
    assert (await batch.audit()).clean
    outcomes = Counter(outcome for trace in await batch.traces() for outcome in earlier(trace))
    assert outcomes.keys() == {"lapse"}


# Stopped, and continued


@pytest.mark.parametrize("when", ["another holds its turns", "another has answered them"])
async def test_a_stopped_worker_that_goes_on_changes_nothing(
    worker: WorkerFactory, asking: Client, when: str
) -> None:
    sim = (*HASHING, "--latency", "2")
    first = worker("--slots", "20", sim=sim)
    batch = await Batch.asked(asking, numbered("turn", 20))
    await held(asking, {await id_of(asking, first): 20})
    first.signal(signal.SIGSTOP)
    second = worker("--slots", "20", sim=sim)
    heir = await id_of(asking, second)
    if when == "another holds its turns":
        await held(asking, {heir: 20})
    else:
        await batch.answered()
    first.signal(signal.SIGCONT)
    await batch.answered()
    # It has let go of all, and serves.
    await says(asking, first, running=0)
    assert (await batch.audit()).clean
    traces = await batch.traces()
    assert all(earlier(trace) == ["lapse"] for trace in traces if trace.worker == heir)
    if when == "another has answered them":
        assert {trace.worker for trace in traces} == {heir}
    second.kill()
    more = await Batch.asked(asking, ["more"])
    await more.answered()
    assert (await more.audit()).clean


# Blocked


async def test_a_blocked_loop_keeps_its_turns(worker: WorkerFactory, asking: Client) -> None:
    first = worker(
        "--slots", "21", sim=(*HASHING, "--latency", "3", "--block-if", "block"), lease=2.0
    )
    id = await id_of(asking, first)
    batch = await Batch.asked(asking, numbered("turn", 20))
    await says(asking, first, running=20)
    blocking = await Batch.asked(asking, ["block"])
    # It is free, and would take what lapses.
    worker("--slots", "30", sim=HASHING)
    everything = Batch(asking, batch.turns + blocking.turns)
    await everything.answered()
    assert (await everything.audit()).clean
    assert {(trace.worker, *earlier(trace)) for trace in await everything.traces()} == {(id,)}


async def test_a_loop_that_stays_blocked_is_given_up(worker: WorkerFactory, asking: Client) -> None:
    first = worker("--stalled-after", "3", sim=("--latency", "60", "--block-if", "block"))
    batch = await Batch.asked(asking, [*numbered("turn", 20), "block"])
    second = worker("--slots", "30", sim=HASHING)
    assert first.wait() == 70
    await batch.answered()
    assert (await batch.audit()).clean
    assert {trace.worker for trace in await batch.traces()} == {await id_of(asking, second)}


# Hung


async def test_the_turns_of_an_engine_that_hangs_go_elsewhere(
    worker: WorkerFactory, asking: Client
) -> None:
    first = worker(
        "--slots",
        "21",
        "--stalled-after",
        "3",
        sim=(*HASHING, "--latency", "2", "--freeze-if", "freeze"),
    )
    id = await id_of(asking, first)
    batch = await Batch.asked(asking, [*numbered("turn", 20), "freeze"])
    await held(asking, {id: 21})
    second = worker("--slots", "30", sim=HASHING)
    assert first.wait() == 70
    assert "the engine has not moved for 3 s: giving up" in first.log
    await batch.answered()
    assert (await batch.audit()).clean
    heir = await id_of(asking, second)
    assert {(t.worker, *earlier(t)) for t in await batch.traces()} == {(heir, "lapse")}


# Told to end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_told_to_end_it_finishes_what_it_can_and_hands_back_the_rest(
    worker: WorkerFactory, asking: Client, number: signal.Signals
) -> None:
    first = worker(
        "--slots", "20", "--drain", "3", sim=(*HASHING, "--latency", "2.5", "--hang-if", "slow")
    )
    ender = await id_of(asking, first)
    quick = await Batch.asked(asking, numbered("quick", 10))
    slow = await Batch.asked(asking, numbered("slow", 10))
    await held(asking, {ender: 20})
    second = worker("--slots", "40", sim=(*HASHING, "--latency", "0.1"))
    heir = await id_of(asking, second)
    first.signal(number)
    await says(asking, first, state="draining")
    later = await Batch.asked(asking, numbered("later", 20))
    everything = Batch(asking, quick.turns + slow.turns + later.turns)
    await everything.answered()
    assert (await everything.audit()).clean
    assert first.wait() == 0
    assert {(t.worker, *earlier(t)) for t in await quick.traces()} == {(ender,)}
    assert {(t.worker, *earlier(t)) for t in await later.traces()} == {(heir,)}
    handed_on = await slow.traces()
    assert {(t.worker, *earlier(t)) for t in handed_on} == {(heir, "drain")}
    assert max(t.times.claimed - t.earlier[0].at for t in handed_on) <= 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_told_twice_it_hands_back_at_once(
    worker: WorkerFactory, asking: Client, number: signal.Signals
) -> None:
    first = worker("--slots", "20", "--drain", "1000", sim=("--hang-if", "slow"))
    batch = await Batch.asked(asking, numbered("slow", 20))
    await held(asking, {await id_of(asking, first): 20})
    second = worker("--slots", "20", sim=HASHING)
    first.signal(number)
    await says(asking, first, state="draining")
    told = time.time()
    first.signal(number)
    assert first.wait() == 0
    await batch.answered()
    assert (await batch.audit()).clean
    traces = await batch.traces()
    heir = await id_of(asking, second)
    assert {(t.worker, *earlier(t)) for t in traces} == {(heir, "drain")}
    assert max(t.times.claimed for t in traces) - told <= 1


async def test_told_to_end_while_it_claims_it_keeps_nothing(
    worker: WorkerFactory, asking: Client
) -> None:
    batch = await Batch.asked(asking, numbered("turn", 200))
    # What a CLAIM brings after the others were handed back must not stay. Three times, for it is a race.
    for _ in range(3):
        first = worker("--slots", "200", "--drain", "0", sim=("--latency", "3600"), registers=False)

        async def claims() -> bool:
            return bool(await holders(asking))

        await until_async(claims, "it has claimed turns")
        first.signal(signal.SIGTERM)
        assert first.wait() == 0
        assert not await holders(asking)
    worker("--slots", "200", sim=HASHING)
    await batch.answered()
    assert (await batch.audit()).clean
    assert {outcome for trace in await batch.traces() for outcome in earlier(trace)} <= {"drain"}
