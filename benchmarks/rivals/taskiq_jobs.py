"""Stock taskiq on Redis streams (its broker that acknowledges), in an environment of its own (the commands are
those of noop.py)."""

from __future__ import annotations

import asyncio
from typing import Any

import uvloop
from noop import answered, body, command_line
from taskiq.api import run_receiver_task
from taskiq.serializers import JSONSerializer
from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker


def _broker(path: str) -> RedisStreamBroker:
    url = f"unix://{path}"
    results: RedisAsyncResultBackend[Any] = RedisAsyncResultBackend(
        url, serializer=JSONSerializer(), prefix_str="result"
    )
    broker = RedisStreamBroker(url, queue_name="bench", consumer_id="0").with_result_backend(
        results
    )

    @broker.task(task_name="answer")
    async def answer(turn: dict[str, Any]) -> dict[str, Any]:
        return answered(turn)

    return broker


async def _fill(path: str, count: int) -> None:
    broker = _broker(path)
    await broker.startup()
    answer = broker.find_task("answer")
    for start in range(0, count, 100):
        numbers = range(start, min(count, start + 100))
        await asyncio.gather(*(answer.kiq(body(n)) for n in numbers))
    await broker.shutdown()


async def _work(path: str, max_async_tasks: int) -> None:
    broker = _broker(path)
    await run_receiver_task(
        broker,
        validate_params=False,
        max_async_tasks=max_async_tasks,
        max_prefetch=max_async_tasks,
        run_startup=True,
    )


if __name__ == "__main__":
    command_line(
        fill=lambda path, count: uvloop.run(_fill(path, count)),
        work=lambda path, max_async_tasks: uvloop.run(_work(path, max_async_tasks)),
    )
