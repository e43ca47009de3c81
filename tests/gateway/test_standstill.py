"""Redis or a gateway stands still for longer than a turn waits for its client: who waited all the time is answered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest
from redis.asyncio import Redis
from tests.gateway.serving import Asking, chat
from tests.processes import SimWorker, until_async

from turnmill.gateway.server import bind, serving, url_of
from turnmill.gateway.settings import GatewaySettings
from turnmill.queue import Queue
from turnmill.settings import Farm

MakeAsking = Callable[..., Asking]
WorkerFactory = Callable[..., SimWorker]

ORPHAN = 1.0
HASH, LANE = "a" * 64, "adhoc"


@pytest.fixture
async def url(farm: Farm) -> AsyncIterator[str]:
    """A gateway in this loop: what blocks the loop stops it."""
    bound = bind("127.0.0.1", 0, insecure=True)
    settings = GatewaySettings(farm, insecure=True, orphan=ORPHAN)
    async with serving(settings, bound, drain=1):
        yield url_of(bound)


async def test_nothing_is_cancelled_by_the_first_who_looks_after_a_pause(
    client: Redis, farm: Farm
) -> None:
    queue = Queue(client, farm.keys)

    async def tend() -> None:
        await queue.tend("sim", patience=ORPHAN, keep=60)

    await queue.tend("sim", [(HASH, LANE)], patience=ORPHAN, keep=60)
    await client.zadd(farm.keys.held("sim"), {HASH + LANE: 1})  # long ago

    async def nobody_tends() -> bool:
        return not await client.exists(farm.keys.tended("sim"))

    await until_async(nobody_tends, "the pause")
    await tend()
    assert await client.zcard(farm.keys.held("sim")) == 1

    async def cancelled() -> bool:
        await tend()
        return not await client.exists(farm.keys.held("sim"))

    await until_async(cancelled, "nobody said that he waits")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_gateway_that_stood_still_asks_again(
    worker: WorkerFactory,
    asking: MakeAsking,
    client: Redis,
    farm: Farm,
    url: str,
    stream: bool,
) -> None:
    worker(sim=("--latency", "2"))
    asked = asking(f"{url}/v1")
    task = asyncio.ensure_future(asked.post(chat(stream=stream)))
    queue = Queue(client, farm.keys)

    async def running() -> bool:
        return (await queue.depth("sim")).running == 1

    await until_async(running, "the turn is in the engine")
    blocked = threading.Thread(target=lambda: asyncio.run(_cancel_all(farm)))
    blocked.start()
    blocked.join()
    response = await task
    assert response.status_code == 200
    assert "error" not in response.text


async def _cancel_all(farm: Farm) -> None:
    """As another gateway does it, for which that one is gone."""
    redis = farm.connect()
    queue = Queue(redis, farm.keys)

    async def cancelled() -> bool:
        await queue.tend("sim", patience=ORPHAN, keep=60)
        return not await redis.exists(farm.keys.held("sim"))

    await until_async(cancelled, "the hold is over")
    await redis.aclose()
