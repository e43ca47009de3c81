"""Answers of scripts that never arrive: the connection is cut exactly between the effect and the answer."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial

import pytest
from tests.faults.aftermath import HASHING, all_is_well, right, traces, turns
from tests.faults.proxy import LossyProxy
from tests.processes import SimWorker, ValkeyServer, until_async

from turnmill.client import Client
from turnmill.faults import patiently
from turnmill.queue import Depth
from turnmill.reply import Reply
from turnmill.scripts import CANCEL, ENQUEUE, Script
from turnmill.settings import Farm
from turnmill_worker.engines.base import EngineSettings, Progress
from turnmill_worker.engines.sim import build
from turnmill_worker.scripts import CLAIM, FINISH, KEEP, RECOVER, RENEW

WorkerFactory = Callable[..., SimWorker]

pytestmark = pytest.mark.faults

LONG = 60.0
"""Seconds: a lease that lapses too late to help a turn that was left behind."""


@pytest.fixture
def proxy(valkey: ValkeyServer) -> Iterator[LossyProxy]:
    with LossyProxy(valkey.socket) as proxy:
        yield proxy


@pytest.fixture
def lossy(farm: Farm, proxy: LossyProxy) -> Farm:
    return Farm(proxy.url, farm.namespace)


@pytest.fixture
async def asking(lossy: Farm) -> AsyncIterator[Client]:
    async with Client(lossy.url, namespace=lossy.namespace, run="run") as client:
        yield client


async def running(asking: Client, count: int) -> None:
    async def reached() -> bool:
        return (await asking.queue.depth("sim")).running == count

    await until_async(reached, f"{count} turns run")


@pytest.mark.parametrize("script", [ENQUEUE, CLAIM, FINISH], ids=lambda script: script.name)
async def test_it_strands_and_strikes_nobody(
    script: Script, worker: WorkerFactory, lossy: Farm, proxy: LossyProxy, asking: Client
) -> None:
    worker("--slots", "8", sim=("--latency", "0.02", *HASHING), farm=lossy, lease=LONG)
    proxy.lose(script, times=5)
    asked, endings = turns(200), []
    for start in range(0, len(asked), 20):  # ENQUEUE is called often, too
        some = asked[start : start + 20]
        endings += await asyncio.wait_for(asyncio.gather(*map(asking.ask, some)), 30)
    assert proxy.lost == 5
    assert right(asked, endings)
    await all_is_well(asking, asked)
    if script is CLAIM:
        assert any(trace.earlier for trace in await traces(asking, asked)), "none was claimed"


async def test_the_clearing_up_of_a_lost_claim_may_be_lost_too(
    worker: WorkerFactory, lossy: Farm, proxy: LossyProxy, asking: Client
) -> None:
    proxy.lose(CLAIM)
    proxy.lose(RECOVER, times=3)
    worker("--slots", "8", sim=("--latency", "0.02", *HASHING), farm=lossy, lease=LONG)
    asked = turns(50)
    assert right(asked, await asyncio.wait_for(asyncio.gather(*map(asking.ask, asked)), 30))
    assert proxy.lost == 4
    await all_is_well(asking, asked)


async def test_a_renewal_counts_although_the_worker_never_hears_of_it(
    worker: WorkerFactory, lossy: Farm, proxy: LossyProxy, asking: Client
) -> None:
    worker("--slots", "8", sim=("--latency", "2.5", *HASHING), farm=lossy)
    worker("--slots", "8", sim=("--latency", "2.5", *HASHING), farm=lossy)
    asked = turns(16)
    waiting = asyncio.gather(*map(asking.ask, asked))
    await running(asking, 16)
    proxy.lose(RENEW, times=8)  # about a lease long, of both workers
    assert right(asked, await asyncio.wait_for(waiting, 30))
    assert proxy.lost == 8
    await all_is_well(asking, asked, tries=())


async def test_a_worker_that_is_not_told_hears_it_at_the_next_renewal(
    worker: WorkerFactory, lossy: Farm, proxy: LossyProxy, asking: Client
) -> None:
    worker("--slots", "1", sim=("--hang-if", "slow"), farm=lossy)
    (slow,) = await asking.submit_many(turns(1, "slow"))
    await running(asking, 1)
    proxy.lose(RENEW, times=2)
    await asking.cancel([slow])
    assert isinstance(await asyncio.wait_for(asking.ask(turns(1, "quick")[0]), 30), Reply)
    assert proxy.lost == 2


async def test_what_is_kept_twice_is_one_answer(
    worker: WorkerFactory, lossy: Farm, proxy: LossyProxy, asking: Client
) -> None:
    answers = (*HASHING, "--answer-tokens", "300")
    growing = (*answers, "--tokens-per-second", "100")
    first = worker("--keep-every", "0.2", sim=growing, farm=lossy)
    asked = turns(8)
    waiting = asyncio.gather(*map(asking.ask, asked))

    async def kept(count: int) -> bool:
        tries = [lossy.keys.tries(turn.hash) for turn in asked]
        counts = [await asking.store.redis.hget(key, "kept") for key in tries]  # type: ignore[misc]
        return all(int(have or 0) > count for have in counts)

    proxy.lose(KEEP)  # the beginnings
    await until_async(partial(kept, 50))
    proxy.lose(KEEP, times=2)  # and parts behind them
    await until_async(partial(kept, 120))
    assert proxy.lost == 3
    first.kill()
    worker("--keep-every", "0.2", sim=growing, farm=lossy)
    endings = await asyncio.wait_for(waiting, 30)
    undisturbed = build(EngineSettings(arguments=answers))
    for turn, ending in zip(asked, endings, strict=True):
        assert isinstance(ending, Reply)
        whole = await undisturbed.answer(turn, turn.hash, Progress())
        assert ending.message.content == whole.message["content"]
    await all_is_well(asking, asked, tries=["lapse"])
    assert all((trace.resumed_at or 0) > 100 for trace in await traces(asking, asked))


async def test_a_hand_back_sent_twice_leaves_the_next_claim_alone(
    worker: WorkerFactory, lossy: Farm, proxy: LossyProxy, asking: Client
) -> None:
    asked = turns(8)
    one = worker("--slots", "8", "--drain", "0", sim=("--hang-if", "turn"), farm=lossy, lease=LONG)
    waiting = asyncio.gather(*map(asking.ask, asked))
    await running(asking, 8)
    worker("--slots", "8", sim=("--latency", "1", *HASHING), farm=lossy, lease=LONG)
    proxy.lose(FINISH)
    one.signal(signal.SIGTERM)
    assert await asyncio.to_thread(one.wait) == 0
    assert right(asked, await asyncio.wait_for(waiting, 30))
    assert proxy.lost == 1
    await all_is_well(asking, asked, tries=["drain"])
    # Each of them was handed back once.
    assert [len(trace.earlier) for trace in await traces(asking, asked)] == [1] * 8


@pytest.mark.parametrize("whole_run", [False, True])
async def test_a_cancel_whose_answer_is_lost_has_cancelled(
    whole_run: bool, worker: WorkerFactory, lossy: Farm, proxy: LossyProxy, asking: Client
) -> None:
    worker("--slots", "4", sim=("--hang-if", "slow"), farm=lossy)
    hashes = await asking.submit_many(turns(20, "slow"))
    await running(asking, 4)
    proxy.lose(CANCEL, times=2)
    if whole_run:
        cancel = partial(asking.queue.cancel, "sim", asking.lane.run)
        await patiently(cancel, patience=30, doing="cancelling")
    else:
        await asking.cancel(hashes)
    assert proxy.lost == 2

    async def over() -> bool:
        (run,) = await asking.store.runs()
        empty = await asking.queue.depth("sim") == Depth(0, 0, 0, 0)
        return empty and (run.total, run.cancelled) == (20, 20)

    await until_async(over)
