"""A session's engine at work: a worker with it in this process, asked through a queue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from turnmill.settings import Farm
from turnmill_worker.engines.base import Engine
from turnmill_worker.worker import TurnWorker

T = TypeVar("T")


def through_a_queue(engine: Engine, farm: Farm, asking: Callable[[], Awaitable[T]]) -> T:
    """What `asking` returns, which runs beside the worker. The engine stays."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    worker = TurnWorker(engine, farm)

    async def ask() -> T:
        try:
            return await asking()
        finally:
            worker.stop()

    task = loop.create_task(ask())
    worker.run()
    found = loop.run_until_complete(task)
    loop.close()
    return found
