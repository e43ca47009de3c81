"""Clients that hang up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from turnmill.tasks import end_tasks

Result = TypeVar("Result")


class HungUp(Exception):
    """The client is gone: there is nobody to answer."""


async def until_gone(receive: Receive) -> None:
    """Returns when the client has hung up. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client hangs up: raises HungUp then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise HungUp
        return await task
    finally:
        await end_tasks([task, gone])
