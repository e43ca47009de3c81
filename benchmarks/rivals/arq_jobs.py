"""Stock arq, in an environment of its own. Beside the commands of noop.py:

arq_jobs.py enqueue_one SOCKET COUNT    put in COUNT jobs, one awaited after the other; prints the seconds
arq_jobs.py enqueue_many SOCKET COUNT   the same with asyncio.gather, some hundreds at a time
arq_jobs.py hold SOCKET MAX_JOBS        a worker whose jobs last an hour
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import uvloop
from arq.connections import ArqRedis, RedisSettings, create_pool
from arq.worker import Worker, func
from noop import answered, body, command_line, dumps

AT_ONCE = 100
"""Jobs in one asyncio.gather: more of them, each with a connection of its own, are slower."""

_JSON: dict[str, Any] = {
    "job_serializer": lambda value: dumps(value).encode(),
    "job_deserializer": json.loads,
}


async def answer(context: dict[str, Any], turn: dict[str, Any]) -> dict[str, Any]:
    return answered(turn)


async def last(context: dict[str, Any], turn: dict[str, Any]) -> None:
    await asyncio.sleep(3600)


async def _one_by_one(pool: ArqRedis, count: int) -> None:
    for number in range(count):
        await pool.enqueue_job("answer", body(number))


async def _many_at_once(pool: ArqRedis, count: int) -> None:
    for start in range(0, count, AT_ONCE):
        numbers = range(start, min(count, start + AT_ONCE))
        await asyncio.gather(*(pool.enqueue_job("answer", body(n)) for n in numbers))


async def _timed(
    path: str, put_in: Callable[[ArqRedis, int], Awaitable[None]], count: int
) -> float:
    pool = await create_pool(RedisSettings(unix_socket_path=path), **_JSON)
    started = time.perf_counter()
    await put_in(pool, count)
    took = time.perf_counter() - started
    await pool.aclose()
    return took


def enqueue(put_in: Callable[[ArqRedis, int], Awaitable[None]], path: str, count: int) -> None:
    print(uvloop.run(_timed(path, put_in, count)))


def work(function: Callable[..., Any], path: str, max_jobs: int) -> None:
    asyncio.set_event_loop(uvloop.new_event_loop())
    Worker(
        functions=[func(function, name="answer", timeout=7200)],
        redis_settings=RedisSettings(unix_socket_path=path),
        max_jobs=max_jobs,
        poll_delay=0.01,
        log_results=False,
        **_JSON,
    ).run()


if __name__ == "__main__":
    command_line(
        fill=partial(enqueue, _many_at_once),
        enqueue_one=partial(enqueue, _one_by_one),
        enqueue_many=partial(enqueue, _many_at_once),
        work=partial(work, answer),
        hold=partial(work, last),
    )
