"""Stock saq, in an environment of its own (the commands are those of noop.py)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import uvloop
from noop import answered, body, command_line, dumps
from saq import Worker
from saq.queue.redis import RedisQueue


def _queue(path: str) -> RedisQueue:
    return RedisQueue.from_url(f"unix://{path}", name="bench", dump=dumps, load=json.loads)


async def answer(context: dict[str, Any], *, turn: dict[str, Any]) -> dict[str, Any]:
    return answered(turn)


async def _fill(path: str, count: int) -> None:
    queue = _queue(path)
    for start in range(0, count, 100):
        numbers = range(start, min(count, start + 100))
        await asyncio.gather(*(queue.enqueue("answer", turn=body(n)) for n in numbers))
    await queue.disconnect()


async def _work(path: str, concurrency: int) -> None:
    queue = _queue(path)
    await Worker(queue, [answer], concurrency=concurrency).start()


if __name__ == "__main__":
    command_line(
        fill=lambda path, count: uvloop.run(_fill(path, count)),
        work=lambda path, concurrency: uvloop.run(_work(path, concurrency)),
    )
