"""Which models can be asked for, and whether there is room in their queues."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from redis.asyncio import Redis

from turnmill.api_keys import ApiKey
from turnmill.gateway.errors import ApiError
from turnmill.gateway.settings import GatewaySettings
from turnmill.queue import Queue
from turnmill.settings import is_outside_runs
from turnmill.store import Store, WorkerInfo

log = logging.getLogger("turnmill.gateway")

LOOK_SECONDS = 1.0
"""How old what we know of workers and queues may be."""

NAMES_SAID = 5
"""How many models an error names."""

Value = TypeVar("Value")


class _Known(Generic[Value]):
    """Something that is read again when it is a second old."""

    def __init__(self, read: Callable[[], Awaitable[Value]]) -> None:
        self._read, self._at = read, -LOOK_SECONDS
        self._value: Value | None = None
        self._reading = asyncio.Lock()
        self.since = 0
        """What was added since it was read, by us."""

    async def value(self) -> Value:
        async with self._reading:  # two that read at once would forget what was added between
            now = time.monotonic()
            if self._value is None or now - self._at >= LOOK_SECONDS:
                self._value, self._at, self.since = await self._read(), now, 0
            return self._value


class Served:
    """What the farm's workers serve now. Raises ApiError, and redis-py's errors as they are."""

    def __init__(self, redis: Redis, settings: GatewaySettings) -> None:
        self._redis, self._settings = redis, settings
        self._keys = settings.farm.keys
        self._queue, self._store = Queue(redis, self._keys), Store(redis, self._keys)
        self._workers = _Known(self._store.workers)
        self._open: dict[tuple[str, str], _Known[int]] = {}
        self._missed: set[str] = set()
        """Models whose turns wait for a worker, which was said."""

    async def models(self, key: ApiKey | None) -> dict[str, list[WorkerInfo]]:
        """The models of live workers that the key may ask for, and these workers."""
        found: dict[str, list[WorkerInfo]] = {}
        for worker in await self._workers.value():
            if may_ask(key, worker.model):
                found.setdefault(worker.model, []).append(worker)
        return found

    async def check(self, model: str, key: ApiKey | None, *, may_wait: bool) -> None:
        """See that somebody serves the model, or, if that may be waited for, has ever done."""
        served = await self.models(key)
        if may_ask(key, model):
            if model in served:
                self._missed.discard(model)
                return
            if await self._redis.exists(self._keys.seen(model)):
                if may_wait:
                    self._say_missed(model)
                    return
                raise ApiError(503, f"no worker serves {model!r} now", code="no_worker")
        text = f"the model {model!r} does not exist, or this key may not ask for it"
        raise ApiError(
            404, f"{text}; {_said(sorted(served))}", param="model", code="model_not_found"
        )

    def _say_missed(self, model: str) -> None:
        # Once, and not for every request: who waits for hours otherwise wonders what for.
        if model not in self._missed:
            self._missed.add(model)
            log.warning("no worker serves %s now: its turns wait in the queue", model)

    async def make_room(self, model: str, key: ApiKey | None, count: int) -> None:
        """See that `count` more turns are within the bounds of the key and of the queue, and count them."""
        if key is not None and key.max_queued is not None:
            await self._fit("key", key.name, count, key.max_queued)
        if self._settings.max_queued is not None:
            await self._fit("model", model, count, self._settings.max_queued)

    async def _fit(self, kind: str, name: str, count: int, bound: int) -> None:
        read = self._open_of_key if kind == "key" else self._open_of_model
        known = self._open.setdefault((kind, name), _Known(lambda: read(name)))
        there = await known.value() + known.since
        if there + count > bound:
            text = f"{there} turns of the {kind} {name!r} are open, and {bound} may be"
            raise ApiError(429, f"{text}: ask again later", code="too_many_queued")
        known.since += count

    async def _open_of_key(self, name: str) -> int:
        raw = await self._redis.smembers(self._keys.runs_of(name))  # type: ignore[misc]
        runs = [run.decode() for run in raw]
        pipe = self._redis.pipeline(transaction=False)
        for run in runs:
            pipe.hmget(self._keys.run(run), ["owner", "total", "done", "failed", "cancelled"])
        count, gone = 0, []
        for run, (owner, total, *ended) in zip(runs, await pipe.execute(), strict=True):
            if owner != name.encode() and not is_outside_runs(run):  # it was forgotten
                gone.append(run)
            else:
                count += int(total or 0) - sum(int(one or 0) for one in ended)
        if gone:
            await self._redis.srem(self._keys.runs_of(name), *gone)  # type: ignore[misc]
        return count

    async def _open_of_model(self, model: str) -> int:
        depth = await self._queue.depth(model)
        return depth.queued + depth.running + depth.due + depth.suspects


def may_ask(key: ApiKey | None, model: str) -> bool:
    return key is None or key.models is None or model in key.models


def _said(served: list[str]) -> str:
    """What can be asked for: names are easily a little wrong."""
    if not served:
        return "no worker serves any now"
    more = ", ..." if len(served) > NAMES_SAID else ""
    return f"workers serve {', '.join(map(repr, served[:NAMES_SAID]))}{more}"
