"""`turnmill worker --restart`: the process that starts a worker again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable

import psutil
import pytest
from tests.batch import HASHING, Batch, holders
from tests.processes import SimWorker, until, until_async

from turnmill.client import Client
from turnmill.restarts import Pauses
from turnmill.settings import Farm
from turnmill.store import WorkerInfo
from turnmill_worker.restart import the_worker

WorkerFactory = Callable[..., SimWorker]

pytestmark = pytest.mark.faults


@pytest.fixture
async def asking(farm: Farm) -> AsyncIterator[Client]:
    async with Client(farm.url, namespace=farm.namespace, run="run") as client:
        yield client


async def the_child(asking: Client, *, instead_of: int = 0) -> WorkerInfo:
    """The worker, once it has registered; not the one that had this process id."""

    async def found() -> list[WorkerInfo]:
        return [info for info in await asking.store.workers() if info.pid != instead_of]

    (info,) = await until_async(found, "the worker has registered")
    return info


async def says(asking: Client, state: str) -> None:
    async def does() -> bool:
        return [info.state for info in await asking.store.workers()] == [state]

    await until_async(does, f"the worker is {state}")


def restarts(supervisor: SimWorker) -> list[str]:
    return [line for line in supervisor.log.splitlines() if "it is started again" in line]


async def test_a_run_ends_complete_though_the_engine_died(
    worker: WorkerFactory, asking: Client
) -> None:
    supervisor = worker(
        "--restart",
        "--slots",
        "30",
        sim=(*HASHING, "--latency", "0.5", "--die-if", "death"),
        registers=False,
    )
    first = await the_child(asking)
    assert first.pid != supervisor.pid
    deadly = await Batch.asked(asking, ["death"])
    batch = await Batch.asked(asking, [f"turn {i}" for i in range(100)])
    await asyncio.to_thread(until, lambda: restarts(supervisor), "it is started again")
    await deadly.cancel()
    await batch.answered()
    assert (await batch.audit()).clean
    (line,) = restarts(supervisor)
    assert line.endswith("the worker ended (exit code 70); it is started again in 1 s")
    second = await the_child(asking, instead_of=first.pid)
    assert {trace.worker for trace in await batch.traces()} <= {first.id, second.id}
    supervisor.signal(signal.SIGTERM)
    assert supervisor.wait() == 0
    assert not psutil.pid_exists(second.pid)


async def test_after_a_signal_it_is_started_again_and_it_ends_with_its_supervisor(
    worker: WorkerFactory, asking: Client
) -> None:
    supervisor = worker("--restart", registers=False)
    first = await the_child(asking)
    os.kill(first.pid, signal.SIGKILL)
    second = await the_child(asking, instead_of=first.pid)
    assert "(signal 9)" in restarts(supervisor)[0]
    supervisor.kill()
    await asyncio.to_thread(until, lambda: not psutil.pid_exists(second.pid), "the worker is gone")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_each_signal_is_the_workers(
    worker: WorkerFactory, asking: Client, number: signal.Signals
) -> None:
    supervisor = worker("--restart", "--drain", "1000", sim=("--hang-if", "slow"), registers=False)
    child = await the_child(asking)
    batch = await Batch.asked(asking, ["slow"])

    async def holds_it() -> bool:
        return await holders(asking) == {child.id: 1}

    await until_async(holds_it, "the turn is in the engine")
    supervisor.signal(number)
    await says(asking, "draining")
    assert await holds_it()
    supervisor.signal(number)
    assert supervisor.wait() == 0
    assert not await holders(asking)
    assert not restarts(supervisor)
    worker(sim=HASHING)
    await batch.answered()
    assert (await batch.audit()).clean


async def test_told_to_end_in_a_pause_it_starts_nothing(
    worker: WorkerFactory, asking: Client
) -> None:
    supervisor = worker("--restart", registers=False)
    os.kill((await the_child(asking)).pid, signal.SIGKILL)
    await asyncio.to_thread(until, lambda: restarts(supervisor), "it is started again")
    supervisor.signal(signal.SIGTERM)
    assert supervisor.wait() == 0
    assert supervisor.log.count("slots, context") == 1


def test_a_wrong_configuration_ends_both_with_2(worker: WorkerFactory) -> None:
    supervisor = worker("--restart", sim=("--latencyy", "1"), registers=False)
    assert supervisor.wait() == 2
    (line,) = supervisor.log.splitlines()
    assert "--latencyy" in line


def test_the_worker_has_the_same_arguments_but_this_one() -> None:
    given = ["--restart", "--engine", "sim", "--", "--latency", "1", "--restart"]
    started = [sys.executable, "-m", "turnmill_worker", "--engine", "sim"]
    assert the_worker(given) == [*started, "--", "--latency", "1", "--restart"]
    assert the_worker(["--engine", "sim", "--restart"]) == started


def test_pauses_grow_until_a_start_was_a_good_one() -> None:
    pauses = Pauses()
    assert [pauses.after(lived) for lived in (0, 59, 0, 0, 0, 0, 0)] == [1, 2, 4, 8, 16, 30, 30]
    assert [pauses.after(lived) for lived in (60, 0, 3600, 0)] == [1, 2, 1, 2]
