"""Ending asyncio tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_AGAIN_SECONDS = 0.2


async def end_tasks(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Cancel tasks, and wait until they have ended; how they ended is not looked at.

    redis-py swallows a cancellation that meets it while it connects, so one is not always enough.
    """
    all_tasks = {task for task in tasks if task is not None}
    left = {task for task in all_tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_AGAIN_SECONDS)
    for task in all_tasks:
        if not task.cancelled():
            task.exception()  # or Python says, of each, that nobody asked
