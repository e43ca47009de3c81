"""A worker's round trips with Redis, where Redis is away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from redis.asyncio import Redis
from tests.processes import ValkeyServer, until_async

from turnmill.settings import Farm
from turnmill_worker.claim import Claim
from turnmill_worker.exchange import AT_ONCE, Exchanges


async def test_lost_claims_do_not_pile_up_while_redis_is_away(
    own_valkey: Callable[..., ValkeyServer],
) -> None:
    """Each would be cleared up on every try: after hours that would be all that a worker does."""
    server = own_valkey()
    farm = Farm(server.url)
    redis: Redis = farm.connect()
    tasks: set[asyncio.Task[None]] = set()
    rounds = 0

    async def taken(claims: list[Claim]) -> None:
        pass

    async def jobs(ids: list[str]) -> None:
        pass

    def spawn(work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def ended() -> None:
        nonlocal rounds
        rounds += 1
        go_on()

    def go_on() -> None:
        while rounds < 40 and exchanges.start(10, 0):
            pass

    prefixes = [farm.keys.prefix, farm.keys.queue("m")]
    exchanges = Exchanges(
        lambda: redis, prefixes, "w" * 8, taken=taken, jobs=jobs, ended=ended, spawn=spawn
    )
    server.kill()
    go_on()

    async def enough() -> bool:
        return rounds >= 40 and not tasks

    await until_async(enough, "forty round trips have failed")
    assert 0 < len(exchanges._unanswered) <= AT_ONCE
    server.start()
    await exchanges.load_scripts()
    rounds = 38
    go_on()
    await until_async(enough, "it has come to terms with Redis")
    assert exchanges._unanswered == []
    await redis.aclose(close_connection_pool=True)
