"""What runs hold, and letting go of it. Everything goes in batches, and may be repeated at any point."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from redis.asyncio import Redis

from turnmill.errors import UsageError
from turnmill.faults import patiently
from turnmill.keys import Keys
from turnmill.queue import FORGET_TURNS, Queue
from turnmill.store import Store


@dataclass(frozen=True)
class RunForgotten:
    """`turns` of a run were let go; of these, `dropped` answers are gone, and others still hold the rest
    or there was no answer. `left`: turns that were asked meanwhile and stay. `existed`: something was known
    of the run."""

    run: str
    existed: bool
    turns: int
    dropped: int
    left: int


@dataclass(frozen=True)
class AnswerForgotten:
    """`runs` held the answer of `hash`. `state`: dropped; else nothing was done: it is open, unknown
    (nothing is stored), or changed while we looked."""

    hash: str
    state: str
    runs: list[str]


def sha1(record: bytes | None) -> str:
    """How FORGET is told which record is meant; empty for none."""
    return hashlib.sha1(record).hexdigest() if record is not None else ""


def _state(runs: Sequence[str], sha: str, result: int) -> str:
    if not sha:
        return "open" if runs else "unknown"
    return "dropped" if result else "changed"


class Holdings:
    """The runs of one namespace and the turns that they hold. `patience`: as for Client."""

    def __init__(self, redis: Redis, keys: Keys, patience: float | None) -> None:
        self._redis, self._keys, self._patience = redis, keys, patience
        self._store, self.queue = Store(redis, keys), Queue(redis, keys)

    async def exists(self, run: str) -> bool:
        keys = self._keys

        async def look() -> bool:
            known = await self._redis.sismember(keys.runs, run)  # type: ignore[misc]
            return bool(known or await self._redis.exists(keys.run(run), keys.manifest(run)))

        return bool(await self._patiently(look))

    async def turns(self, run: str) -> AsyncIterator[tuple[str, list[str]]]:
        """Every turn that the run has asked, some perhaps twice: model, and at most FORGET_TURNS hashes.
        Turns may be let go meanwhile."""
        for model in await self._patiently(self._store.models):
            for key in (self._keys.turns(model, run), self._keys.swept(model, run)):
                async for hashes in self._scan(key):
                    yield model, hashes

    async def open_turns(self, run: str) -> int:
        """How many turns the run waits for. Those that it was told to leave do not count."""
        count = 0
        for model in await self._patiently(self._store.models):
            async for hashes in self._scan(self._keys.turns(model, run)):
                count += await self._patiently(partial(self._count_open, run, hashes))
        return count

    async def check_over(self, run: str) -> None:
        """Raises UsageError if the run waits for turns."""
        count = await self.open_turns(run)
        if count:
            raise UsageError(
                f"run {run!r} has open turns ({count}): let it end, or cancel it, and then again"
            )

    async def forget_run(self, run: str) -> RunForgotten:
        """Let a run go of all its turns that are not open, and of itself if none is left."""
        existed = await self.exists(run)
        turns = dropped = 0
        while True:
            before = turns
            async for model, hashes in self.turns(run):
                results = await self.release(run, model, [(hash, "") for hash in hashes])
                turns += sum(result > 0 for result in results)
                dropped += results.count(1)
            left = await self.forget_rest(run)
            if not left or turns == before:  # a worker may have cleared cancelled turns meanwhile
                return RunForgotten(run, existed, turns, dropped, left)

    async def release(self, run: str, model: str, meant: Sequence[tuple[str, str]]) -> list[int]:
        """Let a run go of turns; see Queue.forget."""
        results: list[int] = []
        for start in range(0, len(meant), FORGET_TURNS):
            some = meant[start : start + FORGET_TURNS]
            results += await self._patiently(partial(self.queue.forget, model, some, run))
        return results

    async def forget_rest(self, run: str) -> int:
        """Remove what the run leaves behind. Returns how many turns are left, if it has any."""
        if await self._patiently(lambda: self.queue.forget_rest(run)):
            return 0
        return sum([len(hashes) async for _, hashes in self.turns(run)])

    async def keep(self, run: str, seconds: float | None) -> None:
        """The run is forgotten in so many seconds, unless it goes on before; None: never. Workers do that,
        as soon as one lives."""
        key = self._keys.expiring

        async def note() -> None:
            if seconds is None:
                await self._redis.zrem(key, run)
            else:
                now, _ = await self._redis.time()  # the only clock of the farm
                await self._redis.zadd(key, {run: int((now + seconds) * 1000)})

        await self._patiently(note)

    async def forget_answers(self, hashes: Sequence[str]) -> list[AnswerForgotten]:
        """Drop stored answers, whoever holds them."""
        forgotten: list[AnswerForgotten] = []
        for start in range(0, len(hashes), FORGET_TURNS):
            some = hashes[start : start + FORGET_TURNS]
            forgotten += await self._forget_answers(list(dict.fromkeys(some)))
        return forgotten

    async def _forget_answers(self, hashes: Sequence[str]) -> list[AnswerForgotten]:
        models = await self._patiently(self._store.models)
        found = await self._patiently(lambda: self._look_at(hashes))
        # Which record is meant is said, so that a call which is repeated drops nothing newer.
        meant: dict[str, list[tuple[str, str]]] = {}
        for hash, (runs, sha) in found.items():
            if sha:
                model = await self._patiently(partial(self._model_of, hash, runs, models))
                meant.setdefault(model, []).append((hash, sha))
        dropped: dict[str, int] = {}
        for model, pairs in meant.items():
            results = await self._patiently(partial(self.queue.forget, model, pairs))
            dropped |= {hash: result for (hash, _), result in zip(pairs, results, strict=True)}
        return [
            AnswerForgotten(hash, _state(runs, sha, dropped.get(hash, 0)), runs)
            for hash, (runs, sha) in found.items()
        ]

    async def _look_at(self, hashes: Sequence[str]) -> dict[str, tuple[list[str], str]]:
        """Which runs hold these turns, and the SHA-1 of what is stored of each (empty: it has not ended)."""
        pipe = self._redis.pipeline(transaction=False)
        for hash in hashes:
            pipe.hkeys(self._keys.waiters(hash))
            pipe.get(self._keys.reply(hash))
            pipe.hget(self._keys.failure(hash), "record")
        found = await pipe.execute()
        return {
            hash: (sorted(run.decode() for run in runs), sha1(reply or failure))
            for hash, runs, reply, failure in zip(
                hashes, found[::3], found[1::3], found[2::3], strict=True
            )
        }

    async def _model_of(self, hash: str, runs: Sequence[str], models: Sequence[str]) -> str:
        """The model whose queue has the turn (its body might be unreadable); any, if no run holds it."""
        pipe = self._redis.pipeline(transaction=False)
        for model in models:
            for run in runs[:1]:
                pipe.sismember(self._keys.turns(model, run), hash)
        found = await pipe.execute()
        return next((m for m, has in zip(models, found, strict=False) if has), (*models, "")[0])

    async def _count_open(self, run: str, hashes: Sequence[str]) -> int:
        pipe = self._redis.pipeline(transaction=False)
        for hash in hashes:
            pipe.hexists(self._keys.waiters(hash), run)
            pipe.exists(self._keys.reply(hash), self._keys.failure(hash))
        found = await pipe.execute()
        return sum(
            waits and not ended for waits, ended in zip(found[::2], found[1::2], strict=True)
        )

    async def _scan(self, key: str) -> AsyncIterator[list[str]]:
        cursor = 0
        while True:
            cursor, raw = await self._patiently(
                lambda at=cursor: self._redis.sscan(key, at, count=FORGET_TURNS)
            )
            hashes = [value.decode() for value in raw]
            for start in range(0, len(hashes), FORGET_TURNS):
                yield hashes[start : start + FORGET_TURNS]
            if not cursor:
                return

    async def _patiently(self, attempt: Callable[..., Awaitable[Any]]) -> Any:
        return await patiently(attempt, patience=self._patience, doing="what runs hold")
