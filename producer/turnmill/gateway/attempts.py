"""Attempts at runs: what is counted of each, and which draw comes next.

Within an attempt, the k-th ask of a body is draw k of the run; Redis counts (ENQUEUE). A new attempt counts from 0
again, and so finds the answers that are stored.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple, TypeVar

from pydantic import BaseModel
from redis.asyncio import Redis

from turnmill.gateway.access import Asker
from turnmill.gateway.errors import ApiError
from turnmill.gateway.settings import GatewaySettings
from turnmill.reply import Reply
from turnmill.store import Store

KEPT_SECONDS = 30 * 86_400
"""After its last ask. As long as ENQUEUE keeps its counts."""
REMEMBERED = 100_000

Key = TypeVar("Key", bound=tuple[str, str])


class AttemptReport(BaseModel):
    """What an attempt was answered, in turns. `stored`: from the store; `made`: for it, or while it waited; `capped_output`
    and `capped_context` are part of these two. `failed`: asks that ended as failures."""

    run: str
    attempt: str
    stored: int = 0
    made: int = 0
    capped_output: int = 0
    capped_context: int = 0
    failed: int = 0


class _Named(NamedTuple):
    """An attempt."""

    run: str
    attempt: str


class Attempts:
    """Attempts of one namespace. Raises redis-py's errors as they are."""

    def __init__(self, redis: Redis, settings: GatewaySettings) -> None:
        self._redis, self._keys = redis, settings.farm.keys
        self._store = Store(redis, self._keys)
        self._started: OrderedDict[_Named, int] = OrderedDict()

    async def enter(self, asker: Asker) -> None:
        """An ask of an attempt. Raises ApiError if its run was cancelled since it began; a new attempt begins the run
        again."""
        if asker.run is None or asker.attempt is None:
            return
        named = _Named(asker.run, asker.attempt)
        started = self._started.get(named)
        if started is None:
            started = await self._begin(named)
            remember(self._started, named, started)
        over = await self._redis.hget(self._keys.run(asker.run), "cancelled_at")  # type: ignore[misc]
        if over is not None and int(float(over)) > started:
            text = f"run {asker.run!r} was cancelled: a new attempt goes on"
            raise ApiError(400, text, code="cancelled", retry=False)

    async def _begin(self, named: _Named) -> int:
        """When the attempt began, in ms of Redis's clock."""
        where = self._keys.attempt(*named)
        seconds, micros = await self._redis.time()
        now = seconds * 1000 + micros // 1000
        pipe = self._redis.pipeline(transaction=True)
        pipe.hsetnx(where, "started", str(now))
        pipe.hget(where, "started")
        pipe.expire(where, KEPT_SECONDS)
        pipe.sadd(self._keys.attempts(named.run), named.attempt)
        new, started, *_ = await pipe.execute()
        if new:
            await self._store.begin(named.run)
        return int(started)

    async def count(self, asker: Asker, what: str, reply: Reply | None = None) -> None:
        """`what`: stored, made or failed."""
        if asker.run is None or asker.attempt is None:
            return
        where = self._keys.attempt(asker.run, asker.attempt)
        pipe = self._redis.pipeline(transaction=False)
        pipe.hincrby(where, what, 1)
        if reply is not None and reply.capped:
            pipe.hincrby(where, f"capped_{reply.capped}", 1)
        pipe.expire(where, KEPT_SECONDS)
        await pipe.execute()

    async def report(self, run: str, attempt: str) -> AttemptReport:
        counts = await self._redis.hgetall(self._keys.attempt(run, attempt))  # type: ignore[misc]
        counted = {name.decode(): int(count) for name, count in counts.items()}
        return AttemptReport.model_validate({"run": run, "attempt": attempt, **counted})


class Guesses:
    """Which draw of a body comes next in a scope, as far as we know: Redis knows it."""

    def __init__(self) -> None:
        self._next: OrderedDict[tuple[str, str], int] = OrderedDict()

    def take(self, scope: str, base: str) -> int:
        number = self._next.get((scope, base), 0)
        remember(self._next, (scope, base), number + 1)
        return number

    def correct(self, scope: str, base: str, number: int) -> None:
        """The draw that was asked for turned out to be this one."""
        remember(self._next, (scope, base), number + 1)


def remember(known: OrderedDict[Key, int], key: Key, value: int) -> None:
    """Note it as the newest, and forget the oldest if there are very many."""
    known[key] = value
    known.move_to_end(key)
    if len(known) > REMEMBERED:
        known.popitem(last=False)
