"""What is kept: replies, failures, traces, runs, and which workers live."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import from_json
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from turnmill.errors import RecordError
from turnmill.keys import Keys
from turnmill.reply import EngineIdentity, Failure, Reply, Trace
from turnmill.turn import Turn
from turnmill.wire import decode, decode_turn

Ending = Reply | Failure
"""How a turn ended: a reply, or a failure (cancelled and past its deadline included)."""

READ_BATCH = 200
BENCH_SILENCE = 10.0
"""Seconds. A benched worker that has said nothing for so long waits no longer."""


class WorkerInfo(BaseModel):
    """What a worker says of itself, twice a second. `state`: serving, draining, or away (its engine cannot be
    reached). `tokens`: made since it started, those of running turns too."""

    model_config = ConfigDict(frozen=True)

    id: str
    host: str
    pid: int
    model: str
    revision: str | None = None
    engine: EngineIdentity
    slots: int
    context: int
    running: int
    tokens: int = 0
    state: str
    started: float
    heartbeat: float


class BenchedWorker(BaseModel):
    """A worker that waits before it loads its model, because it has crashed too often. `devices`: its
    CUDA_VISIBLE_DEVICES. `why`: its last crash. `until`, `heartbeat`: Unix times in seconds, by Redis's clock.
    """

    model_config = ConfigDict(frozen=True)

    host: str
    pid: int
    model: str | None
    engine: str
    devices: str | None
    why: str
    until: float
    heartbeat: float


class RunInfo(BaseModel):
    """The counters of a run, in turns."""

    model_config = ConfigDict(frozen=True)

    name: str
    total: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0

    @property
    def open(self) -> int:
        """Turns that have not ended for this run."""
        return max(0, self.total - self.done - self.failed - self.cancelled)


class Store:
    """Reads of one namespace. Raises redis-py's errors as they are, and RecordError."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self.redis, self._keys = redis, keys

    async def reply(self, hash: str) -> Reply | None:
        data = await self.redis.get(self._keys.reply(hash))
        return None if data is None else decode(Reply, data)

    async def failure(self, hash: str) -> Failure | None:
        data = await self.redis.hget(self._keys.failure(hash), "record")  # type: ignore[misc]
        return None if data is None else decode(Failure, data)

    async def trace(self, hash: str) -> Trace | None:
        data = await self.redis.get(self._keys.trace(hash))
        return None if data is None else decode(Trace, data)

    async def turn(self, hash: str) -> Turn | None:
        data = await self.redis.get(self._keys.body(hash))
        return None if data is None else decode_turn(data)

    async def endings(self, run: str, hashes: Sequence[str]) -> dict[str, Ending]:
        """How these turns ended, for this run. Turns that are open are not in the result."""
        endings: dict[str, Ending] = {}
        for start in range(0, len(hashes), READ_BATCH):
            endings.update(await self._endings(run, hashes[start : start + READ_BATCH]))
        return endings

    async def _endings(self, run: str, hashes: Sequence[str]) -> dict[str, Ending]:
        endings: dict[str, Ending] = {}
        unanswered = []
        replies = await self.redis.mget([self._keys.reply(hash) for hash in hashes])
        for hash, data in zip(hashes, replies, strict=True):
            if data is None:
                unanswered.append(hash)
            else:
                endings[hash] = decode(Reply, data)
        if not unanswered:
            return endings
        pipe = self.redis.pipeline(transaction=False)
        for hash in unanswered:
            pipe.hget(self._keys.failure(hash), "record")
            pipe.hget(self._keys.leavers(hash), run)
        found = await pipe.execute()
        for hash, record, left in zip(unanswered, found[::2], found[1::2], strict=True):
            if left is not None:
                endings[hash] = _left(hash, left.decode())
            elif record is not None:
                endings[hash] = decode(Failure, record)
        return endings

    async def engines(self, hashes: Sequence[str]) -> list[EngineIdentity]:
        """The engines that answered these turns, each once, in the order in which they are met."""
        met: dict[EngineIdentity, None] = {}
        for start in range(0, len(hashes), READ_BATCH):
            some = hashes[start : start + READ_BATCH]
            for data in await self.redis.mget([self._keys.trace(hash) for hash in some]):
                with suppress(RecordError):  # its reply is fine, and so is the run
                    engine = None if data is None else decode(Trace, data).engine
                    if engine is not None:
                        met[engine] = None
        return list(met)

    async def workers(self) -> list[WorkerInfo]:
        """The workers that live, by id. Those whose record has expired are gone."""
        ids = sorted(raw.decode() for raw in await self.redis.smembers(self._keys.workers))  # type: ignore[misc]
        if not ids:
            return []
        records = await self.redis.mget([self._keys.worker(id) for id in ids])
        gone = [id for id, data in zip(ids, records, strict=True) if data is None]
        if gone:
            with suppress(ResponseError):  # who may only read leaves the tidying to others
                await self.redis.srem(self._keys.workers, *gone)  # type: ignore[misc]
        return [WorkerInfo.model_validate(from_json(data)) for data in records if data]

    async def benched(self) -> list[BenchedWorker]:
        """The workers that wait on the bench now, by host and process."""
        seconds, _ = await self.redis.time()
        records = await self.redis.hvals(self._keys.benched)  # type: ignore[misc]
        benched = [BenchedWorker.model_validate(from_json(data)) for data in records]
        alive = [one for one in benched if seconds - one.heartbeat < BENCH_SILENCE]
        return sorted(alive, key=lambda one: (one.host, one.pid))

    async def models(self) -> list[str]:
        """The models that turns were ever asked of."""
        prefix = len(self._keys.queue("")) - 1
        names = await self.redis.smembers(self._keys.models)  # type: ignore[misc]
        return sorted(name.decode()[prefix:-1] for name in names)

    async def runs(self) -> list[RunInfo]:
        names = sorted(raw.decode() for raw in await self.redis.smembers(self._keys.runs))  # type: ignore[misc]
        pipe = self.redis.pipeline(transaction=False)
        for name in names:
            pipe.hmget(self._keys.run(name), ["total", "done", "failed", "cancelled"])
        infos = []
        for name, counters in zip(names, await pipe.execute(), strict=True):
            total, done, failed, cancelled = (int(value or 0) for value in counters)
            infos.append(
                RunInfo(name=name, total=total, done=done, failed=failed, cancelled=cancelled)
            )
        return infos

    async def begin(self, run: str) -> None:
        """A producer begins a run, or begins it again: that it was cancelled counts no more."""
        await self.redis.hdel(self._keys.run(run), "stopped")  # type: ignore[misc]

    async def stopped(self, run: str) -> bool:
        """Whether the whole run was cancelled, and no producer has begun it again."""
        return bool(await self.redis.hexists(self._keys.run(run), "stopped"))  # type: ignore[misc]

    async def manifest(self, run: str) -> dict[str, Any] | None:
        """What a run was begun as; it names its `model`."""
        data = await self.redis.get(self._keys.manifest(run))
        if data is None:
            return None
        try:
            manifest = from_json(data)
            if not isinstance(manifest, dict) or not isinstance(manifest.get("model"), str):
                raise ValueError("it names no model")
        except ValueError as error:
            raise RecordError(f"the manifest of run {run!r} cannot be read: {error}") from None
        return manifest


def _left(hash: str, how: str) -> Failure:
    if how == "deadline":
        return Failure(hash=hash, kind="deadline", text="its time was up", tries=0)
    return Failure(hash=hash, kind="cancelled", text="cancelled on request", tries=0)
