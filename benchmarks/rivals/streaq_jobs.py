"""Stock streaq, in an environment of its own (the commands are those of noop.py)."""

from __future__ import annotations

import json
from typing import Any

import uvloop
from noop import answered, body, command_line, dumps
from streaq import Worker


def _worker(path: str, concurrency: int = 16) -> Worker[Any]:
    worker: Worker[Any] = Worker(
        f"unix://{path}",
        queue_name="bench",
        concurrency=concurrency,
        serializer=dumps,
        deserializer=json.loads,
        anyio_kwargs={"use_uvloop": True},
    )

    @worker.task(name="answer", ttl=None, silent=True)
    async def answer(turn: dict[str, Any]) -> dict[str, Any]:
        return answered(turn)

    return worker


async def _fill(path: str, count: int) -> None:
    worker = _worker(path)
    async with worker:
        answer = worker.registry["answer"]
        for start in range(0, count, 500):
            numbers = range(start, min(count, start + 500))
            await worker.enqueue_many([answer.enqueue(body(n)) for n in numbers])


if __name__ == "__main__":
    command_line(
        fill=lambda path, count: uvloop.run(_fill(path, count)),
        work=lambda path, concurrency: _worker(path, concurrency).run_sync(),
    )
