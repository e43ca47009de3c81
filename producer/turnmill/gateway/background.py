"""What is written to Redis beside the answers: nobody waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from redis.exceptions import RedisError

from turnmill.errors import TurnmillError
from turnmill.tasks import end_tasks

log = logging.getLogger("turnmill.gateway")

SETTLING_SECONDS = 2.0


class Background:
    """Tasks that end by themselves; one that fails says so in the log."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settled(self) -> None:
        """Wait for what is on its way, briefly."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=SETTLING_SECONDS)

    async def close(self) -> None:
        await self.settled()
        await end_tasks(list(self._tasks))


async def _logged(work: Coroutine[Any, Any, Any]) -> None:
    try:
        await work
    except (RedisError, OSError, TurnmillError) as error:
        log.warning("a note to Redis was lost: %s", error)
