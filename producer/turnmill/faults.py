"""Which Redis errors pass by themselves, and waiting until they do."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ConnectionError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from turnmill.errors import QueueFull, RedisAway, RedisUnusable

log = logging.getLogger("turnmill.redis")

_PASSING = ("BUSY", "MASTERDOWN", "MISCONF", "NOREPLICAS", "TRYAGAIN", "UNBLOCKED")
"""First words of errors that say: not now, and have no class of their own in redis-py."""

_REFUSALS = (AuthenticationError, AuthorizationError, NoPermissionError)

Result = TypeVar("Result")


def refuses(error: BaseException) -> bool:
    """Whether Redis refuses us, not this command: only a person can mend it."""
    # redis-py wraps what it is refused while it connects into a ConnectionError.
    return any(isinstance(part, _REFUSALS) for part in (error, *error.args))


def passes(error: BaseException) -> bool:
    """Whether asking again later can help, with nothing changed on our side."""
    if refuses(error):
        return False
    if isinstance(error, ConnectionError | TimeoutError | OSError | asyncio.TimeoutError):
        return True
    if isinstance(error, NoScriptError | ReadOnlyError | OutOfMemoryError):
        return True
    return isinstance(error, ResponseError) and str(error).startswith(_PASSING)


def translate(error: RedisError) -> Exception:
    """A Redis error as one of ours where it has a name."""
    text = str(error)
    if "TURNMILLFULL" in text or isinstance(error, OutOfMemoryError):
        return QueueFull(
            "Redis is short of memory for more turns; what is queued is still answered. "
            "Raise maxmemory, or ask again later"
        )
    return RedisUnusable(f"Redis refuses: {text}")


async def patiently(
    attempt: Callable[[], Awaitable[Result]], *, patience: float | None, doing: str
) -> Result:
    """The result of `attempt`, repeated while Redis is away or has no room, for up to `patience`
    seconds (None: for ever). Says so once. Raises RedisUnusable, QueueFull, RedisAway."""
    started, pause, said = time.monotonic(), 0.05, False
    while True:
        try:
            result = await attempt()
        except (RedisError, OSError) as error:
            problem: Exception = error
            full = isinstance(error, OutOfMemoryError)
            if isinstance(error, RedisError) and (full or not passes(error)):
                problem = translate(error)
                if not isinstance(problem, QueueFull):
                    raise problem from error
            if patience is not None and time.monotonic() - started > patience:
                if not isinstance(problem, QueueFull):
                    problem = RedisAway(f"Redis is away: {error}")
                raise problem from error
            if not said:
                log.warning("%s; waiting to go on with: %s", problem, doing)
                said = True
        else:
            if said:
                log.warning("Redis is back after %.1f s", time.monotonic() - started)
            return result
        await asyncio.sleep(pause)
        pause = min(pause * 2, 0.25)
