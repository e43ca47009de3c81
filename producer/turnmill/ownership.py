"""A run has one producer: a lease in Redis says which."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from redis.asyncio import Redis
from redis.asyncio.lock import Lock
from redis.exceptions import LockError, LockNotOwnedError, RedisError

from turnmill.errors import RunInUse
from turnmill.faults import patiently
from turnmill.tasks import end_tasks

log = logging.getLogger("turnmill.run")

HOLD_SECONDS = 15.0


@asynccontextmanager
async def sole_producer(redis: Redis, key: str, run: str) -> AsyncIterator[asyncio.Future[None]]:
    """Be the run's producer inside the block. Raises RunInUse, which names the one that is.

    Yields a future that fails with RunInUse if another producer took over while Redis was away.
    """
    lock = Lock(redis, key, timeout=HOLD_SECONDS, blocking=False, thread_local=False)
    me = _self()

    async def acquire() -> str:
        """Empty, or who holds it."""
        if await lock.acquire(token=me):
            return ""
        holder = await _holder(redis, key)
        if holder == me:  # the answer to an earlier try was lost
            lock.local.token = me.encode()
            return ""
        return "" if _is_dead(holder) and await _take_over(lock, holder, me) else holder

    holder = await patiently(acquire, patience=None, doing=f"run {run}")
    if holder:
        raise RunInUse(
            f"run {run!r} has a producer: {_named(holder)}. If that one was killed, "
            f"its hold ends within {HOLD_SECONDS:.0f} s"
        )
    usurped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    keeper = asyncio.create_task(_hold(lock, redis, key, run, me, usurped))
    try:
        yield usurped
    finally:
        await end_tasks([keeper])
        usurped.cancel()
        with suppress(LockError, RedisError, OSError):
            await lock.release()


async def _hold(
    lock: Lock, redis: Redis, key: str, run: str, me: str, usurped: asyncio.Future[None]
) -> None:
    while True:
        await asyncio.sleep(HOLD_SECONDS / 3)
        try:
            if await _still_ours(lock, me):
                continue
            holder = await _holder(redis, key)
            if not usurped.done():
                usurped.set_exception(RunInUse(f"run {run!r} was taken over by {_named(holder)}"))
            return
        except (RedisError, OSError) as error:
            log.debug("the run's lease cannot be renewed now: %s", error)


async def _still_ours(lock: Lock, me: str) -> bool:
    try:
        await lock.reacquire()
    except LockNotOwnedError:
        # It lapsed while Redis was away or this process stood still; nobody may have taken it.
        return bool(await lock.acquire(token=me))
    return True


async def _take_over(lock: Lock, holder: str, me: str) -> bool:
    """Take the lease of a producer that is known to be dead, unless somebody was quicker."""
    with suppress(LockError):
        await lock.do_release(holder.encode())
    return bool(await lock.acquire(token=me))


async def _holder(redis: Redis, key: str) -> str:
    value = await redis.get(key)
    return value.decode() if value else ""


def _self() -> str:
    """Host, process, the process's start (a process id alone comes back), and which of its runs this is."""
    return f"{_host()} {os.getpid()} {_started(os.getpid())} {uuid.uuid4().hex[:8]}"


def _host() -> str:
    """The host's name, its boot, and its table of processes: containers may share the first two."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{platform.node()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    return platform.node()


def _started(pid: int) -> str:
    """When a process started, in clock ticks since boot; empty if there is none, or if it has ended and only its parent
    does not know yet."""
    with suppress(OSError, IndexError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]
    return ""


def _is_dead(holder: str) -> bool:
    """Whether it is known that the holder is gone; of another host nothing is known."""
    host, pid, started = (*holder.split(" "), "", "")[:3]
    return host == _host() and pid.isdecimal() and _started(int(pid)) != started


def _named(holder: str) -> str:
    host, pid = (*holder.split(" "), "")[:2]
    return f"process {pid} on {host.partition('/')[0]}"
