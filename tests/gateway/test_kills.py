"""Gateways and workers are killed in the middle: clients that try again get what they asked for, once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
from redis.asyncio import Redis
from tests.gateway.serving import Asking, GatewayProcess, chat, half_a_minute_later
from tests.processes import SimWorker, until_async

from turnmill.queue import Queue
from turnmill.settings import Farm
from turnmill.store import RunInfo, Store

Serve = Callable[..., GatewayProcess]
MakeAsking = Callable[..., Asking]
WorkerFactory = Callable[..., SimWorker]

CHAIN = ("--answer", "chain", "--answer-tokens", "6", "--latency", "0.3")
COUNT = 40


async def persistently(urls: list[str], path: str, content: str) -> str:
    """As OpenAI's own clients: what fails is tried again, and says how often it was tried. The next try goes to the
    next gateway."""
    for tries in range(200):
        client = Asking(urls[tries % len(urls)] + path)
        try:
            return await client.content(chat(content), {"x-stainless-retry-count": str(tries)})
        except httpx.TransportError:
            await asyncio.sleep(0.05)
        finally:
            await client.http.aclose()
    raise AssertionError("never answered")


async def the_run(redis: Redis, farm: Farm, run: str) -> RunInfo:
    return next(info for info in await Store(redis, farm.keys).runs() if info.name == run)


async def test_a_gateway_and_a_worker_are_killed(
    serve: Serve, worker: WorkerFactory, client: Redis, farm: Farm
) -> None:
    first, second = worker(lease=0.5, sim=CHAIN), worker(lease=0.5, sim=CHAIN)
    one, other = serve("--insecure"), serve("--insecure")
    path = "/runs/run/attempts/1/v1"
    # Half of the bodies are equal: their draws must stay apart.
    contents = [f"question {i if i % 2 else 0}" for i in range(COUNT)]
    tasks = [
        asyncio.ensure_future(persistently([one.url, other.url], path, content))
        for content in contents
    ]

    async def under_way() -> bool:
        return await client.exists(farm.keys.run("run")) == 1 and (
            (await the_run(client, farm, "run")).total >= COUNT // 2
        )

    await until_async(under_way, "turns are under way")
    one.kill()
    first.kill()
    answers = await asyncio.gather(*tasks)
    assert len(set(answers)) == COUNT
    info = await the_run(client, farm, "run")
    assert info.total == info.done == COUNT, "every turn was asked once, and answered"
    depth = await Queue(client, farm.keys).depth("sim")
    assert (depth.running, depth.due, depth.suspects) == (0, 0, 0)
    assert second.process.poll() is None


async def test_what_a_killed_gateway_held_is_cancelled_by_another(
    serve: Serve, worker: WorkerFactory, client: Redis, farm: Farm, asking: MakeAsking
) -> None:
    worker(lease=0.5, sim=("--hang-if", "stuck"))
    one = serve("--insecure")
    task = asyncio.ensure_future(asking(f"{one.url}/v1").post(chat("stuck")))
    queue = Queue(client, farm.keys)

    async def running(count: int) -> bool:
        return (await queue.depth("sim")).running == count

    await until_async(lambda: running(1), "the turn is in the engine")
    one.kill()
    await asyncio.wait([task])
    (held,) = await client.zrange(farm.keys.held("sim"), 0, -1)
    await half_a_minute_later(client, farm, [held])
    serve("--insecure")
    await until_async(lambda: running(0), "another gateway has cancelled it")
    assert (await the_run(client, farm, "adhoc")).cancelled == 1
