"""Runs to files and back: a run's records leave Redis when they are safe in a file, and not before.

Everything here may be killed at any point, and the same call again finishes it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import from_json
from redis.asyncio import Redis

from turnmill.archive_file import (
    ArchivedEffect,
    ArchivedTurn,
    ArchiveFile,
    ArchiveWriter,
    FailureText,
    Header,
    Trailer,
    as_record,
    as_text,
)
from turnmill.errors import ManifestChanged, QueueFull, UsageError
from turnmill.faults import patiently
from turnmill.holdings import Holdings, sha1
from turnmill.keys import Keys
from turnmill.ownership import sole_producer
from turnmill.queue import BATCH_BYTES
from turnmill.scripts import RESTORE, call
from turnmill.settings import check_name

log = logging.getLogger("turnmill.archive")

BATCH_TURNS = 200
BATCH_EFFECTS = 50
"""Read at once: what an effect was can be long, and the size of none is known before."""
FULL = 0.85
"""Of maxmemory: what ENQUEUE leaves free for answers, a restored run leaves free too."""

_NONE = sha1(b"")

Item = TypeVar("Item")


@dataclass(frozen=True)
class Archived:
    """`turns` of a run, and what its `effects` were, are in `file`, which has `bytes`. In Redis, `dropped` answers
    were freed, and `left` turns stay because they changed meanwhile."""

    run: str
    file: str
    bytes: int
    turns: int
    effects: int
    dropped: int
    left: int


@dataclass(frozen=True)
class Restored:
    """`stored` answers of a run's `turns` were written; the others were there already. So with `effects`, of which
    `written` were."""

    run: str
    turns: int
    stored: int
    effects: int
    written: int


class Archive:
    """Archives of one namespace's runs. `patience`: as for Client.

    Methods raise UsageError (BadInput and RunInUse among them), CannotWrite, QueueFull, and what Redis
    refuses.
    """

    def __init__(self, redis: Redis, keys: Keys, patience: float | None = None) -> None:
        self._redis, self._keys, self._patience = redis, keys, patience
        self._holdings = Holdings(redis, keys, patience)

    async def archive(self, run: str, path: Path, *, keep_stored: bool = False) -> Archived:
        """Write a run into a file, and free what no other run holds.

        If the file is there, from an attempt that was killed perhaps, what only it has is taken over.
        """
        async with self._alone(run) as check:
            before = await _in_thread(lambda: _of_run(run, path))
            if not await self._holdings.exists(run):
                if before is None:
                    raise UsageError(f"there is no run {run!r}")
                return _archived(before, path)
            await self._holdings.check_over(run)
            header = await self._header(run, before)
            if before and before.header.manifest and before.header.manifest != header.manifest:
                raise ManifestChanged(
                    f"{path} is an archive of {run!r} with other settings: choose another file"
                )
            with ArchiveWriter(path, header) as writer:
                await self._write(run, writer, before)
                await _in_thread(writer.finish)
                # Read back before anything is freed, and before an older file is replaced.
                file = await _in_thread(lambda: ArchiveFile(writer.partial, path))
                await _in_thread(writer.publish)
            file.path = path
            check()
            return (
                _archived(file, path) if keep_stored else await self._free(run, file, path, check)
            )

    async def restore(self, path: Path) -> Restored:
        """Bring a run back from its file. An answer, or effect, that is there already wins.

        Effects first: whoever drives a run that is only half back asks turns again, but does nothing twice.
        """
        file = await _in_thread(lambda: ArchiveFile(path))
        run = check_name(file.header.run, "run")
        await self._check_room(file.trailer)
        async with self._alone(run) as check:
            await self._restore_manifest(run, file.header)
            written = stored = 0
            async for effects in _off_loop(file.effects(BATCH_EFFECTS)):
                check()
                written += await self._restore_effects(run, effects)
            async for turns in _off_loop(file.batches(BATCH_TURNS)):
                check()
                stored += await self._restore(run, file.header.weight, turns)
        return Restored(run, file.trailer.turns, stored, file.trailer.effects, written)

    # Writing

    async def _header(self, run: str, before: ArchiveFile | None) -> Header:
        keys = self._keys
        earlier = (before.header.engines if before else None) or ()

        async def read() -> Header:
            manifest = await self._redis.get(keys.manifest(run))
            weight = await self._redis.hget(keys.run(run), "weight")  # type: ignore[misc]
            engines = await self._redis.smembers(keys.engines(run))  # type: ignore[misc]
            return Header(
                run=run,
                weight=(weight or b"1.0").decode(),
                manifest=manifest and manifest.decode(),
                engines=sorted({*earlier, *(engine.decode() for engine in engines)}) or None,
                made=round(time.time(), 3),
            )

        header: Header = await self._patiently(read)
        return header

    async def _write(self, run: str, writer: ArchiveWriter, before: ArchiveFile | None) -> None:
        """First what Redis has: of two lines of one turn, or effect, the first counts when it is restored."""
        async for effects in self._journal(run):
            await _in_thread(partial(writer.add_effects, effects))
        if before is not None:
            async for older in _off_loop(before.effects(BATCH_EFFECTS)):
                missing = await self._patiently(partial(self._not_in_journal, run, older))
                await _in_thread(partial(writer.add_effects, missing))
        async for model, hashes in self._holdings.turns(run):
            turns = await self._patiently(partial(self._read, run, model, hashes))
            await _in_thread(partial(writer.add, turns))
        if before is None:
            return
        async for batch in _off_loop(before.batches(BATCH_TURNS)):
            held = await self._patiently(partial(self._held, run, batch))
            rest = [turn for turn, is_held in zip(batch, held, strict=True) if not is_held]
            await _in_thread(partial(writer.add, rest))

    async def _journal(self, run: str) -> AsyncIterator[list[ArchivedEffect]]:
        """All entries, some perhaps twice."""
        key, cursor = self._keys.journal(run), 0
        while True:
            cursor, entries = await self._patiently(
                lambda at=cursor: self._redis.hscan(key, at, count=BATCH_EFFECTS)
            )
            yield [
                ArchivedEffect(effect=name.decode(), was=as_text(was))
                for name, was in entries.items()
            ]
            if not cursor:
                return

    async def _not_in_journal(
        self, run: str, effects: Sequence[ArchivedEffect]
    ) -> list[ArchivedEffect]:
        pipe = self._redis.pipeline(transaction=False)
        for one in effects:
            pipe.hexists(self._keys.journal(run), one.effect)
        found = await pipe.execute()
        return [one for one, is_there in zip(effects, found, strict=True) if not is_there]

    async def _read(self, run: str, model: str, hashes: Sequence[str]) -> list[ArchivedTurn]:
        keys = self._keys
        pipe = self._redis.pipeline(transaction=False)  # what changes meanwhile is not freed
        for hash in hashes:
            pipe.mget(keys.body(hash), keys.reply(hash), keys.trace(hash))
            pipe.hmget(keys.failure(hash), ["kind", "record"])
            pipe.lrange(keys.earlier(hash), 0, -1)
            pipe.hget(keys.waiters(hash), run)
            pipe.hget(keys.leavers(hash), run)
            pipe.sismember(keys.swept(model, run), hash)
        found = iter(await pipe.execute())
        turns = []
        for hash in hashes:
            (body, reply, trace), (kind, failure), earlier, waiter, left, swept = (
                next(found) for _ in range(6)
            )
            is_open = reply is None and failure is None
            if is_open and waiter and not swept:
                raise UsageError(f"run {run!r} was asked for more meanwhile: turn {hash} is open")
            if is_open and waiter:  # it was told to leave, and nobody has cleared that yet
                waiter, left = None, b"cancelled"
            turns.append(
                ArchivedTurn(
                    hash=hash,
                    model=model,
                    body=body and as_text(body),
                    reply=reply and as_text(reply),
                    trace=trace and as_text(trace),
                    failure=failure and FailureText(kind=kind.decode(), record=as_text(failure)),
                    earlier=[as_text(one) for one in earlier] or None,
                    waiter=waiter and waiter.decode(),
                    left=left and left.decode(),
                    stored=sha1(reply or failure) or _NONE,
                )
            )
        return turns

    async def _held(self, run: str, turns: Sequence[ArchivedTurn]) -> list[bool]:
        pipe = self._redis.pipeline(transaction=False)
        for turn in turns:
            pipe.sismember(self._keys.turns(turn.model, run), turn.hash)
            pipe.sismember(self._keys.swept(turn.model, run), turn.hash)
        found = await pipe.execute()
        return [bool(a or b) for a, b in zip(found[::2], found[1::2], strict=True)]

    async def _free(
        self, run: str, file: ArchiveFile, path: Path, check: Callable[[], None]
    ) -> Archived:
        """What the file has goes, if it is still what the file has. The journal goes with the last turn."""
        dropped = 0
        async for batch in _off_loop(file.batches(BATCH_TURNS)):
            by_model: dict[str, list[tuple[str, str]]] = {}
            for turn in batch:
                by_model.setdefault(turn.model, []).append((turn.hash, turn.stored))
            for model, meant in by_model.items():
                results = await self._holdings.release(run, model, meant)
                dropped += results.count(1)
        check()
        return _archived(file, path, dropped, await self._holdings.forget_rest(run))

    # Restoring

    async def _check_room(self, trailer: Trailer) -> None:
        info = await self._patiently(lambda: self._redis.info("memory"))
        limit = int(info.get("maxmemory", 0))
        if limit and info["used_memory"] + trailer.bytes > FULL * limit:
            raise QueueFull(
                f"the archive needs about {trailer.bytes >> 20} MB, more than 85% of maxmemory "
                "has room for: raise maxmemory, or free something else"
            )

    async def _restore_manifest(self, run: str, header: Header) -> None:
        if header.manifest is None:
            return
        key, manifest = self._keys.manifest(run), header.manifest.encode()
        await self._patiently(lambda: self._redis.set(key, manifest, nx=True))
        there = await self._patiently(lambda: self._redis.get(key))
        if from_json(there) != from_json(manifest):
            raise ManifestChanged(f"run {run!r} is here already, with other input or settings")
        if engines := header.engines:
            await self._patiently(lambda: self._redis.sadd(self._keys.engines(run), *engines))  # type: ignore[arg-type,return-value]

    async def _restore_effects(self, run: str, effects: Sequence[ArchivedEffect]) -> int:
        key, written = self._keys.journal(run), 0
        for some in _portions([[one.effect, as_record(one.was)] for one in effects]):

            async def write(some: list[list[str | bytes | int]] = some) -> int:
                pipe = self._redis.pipeline(transaction=False)
                for name, was in some:
                    pipe.hsetnx(key, str(name), was)  # type: ignore[arg-type]  # bytes as well
                return sum(await pipe.execute())

            written += await self._patiently(write)
        return written

    async def _restore(self, run: str, weight: str, turns: Sequence[ArchivedTurn]) -> int:
        by_model: dict[str, list[list[str | bytes | int]]] = {}
        for turn in turns:
            by_model.setdefault(turn.model, []).append(_arguments(turn))
        stored = 0
        for model, arguments in by_model.items():
            keys = [self._keys.prefix, self._keys.queue(model)]
            for some in _portions(arguments):
                args = [run, weight, *(part for one in some for part in one)]
                stored += await self._patiently(partial(call, self._redis, RESTORE, keys, args))
        return stored

    @asynccontextmanager
    async def _alone(self, run: str) -> AsyncIterator[Callable[[], None]]:
        """As the run's producer, so that nobody drives it meanwhile. Yields a check that it is still so."""
        async with sole_producer(self._redis, self._keys.producer(run), run) as usurped:

            def check() -> None:
                if usurped.done():
                    usurped.result()

            yield check

    async def _patiently(self, attempt: Callable[..., Awaitable[Any]]) -> Any:
        return await patiently(attempt, patience=self._patience, doing="archives")


def _of_run(run: str, path: Path) -> ArchiveFile | None:
    """What an earlier attempt has written."""
    if not path.exists():
        return None
    file = ArchiveFile(path)
    if file.header.run != run:
        raise UsageError(f"{path} is an archive of run {file.header.run!r}: choose another file")
    return file


def _archived(file: ArchiveFile, path: Path, dropped: int = 0, left: int = 0) -> Archived:
    size = path.stat().st_size
    trailer = file.trailer
    return Archived(file.header.run, str(path), size, trailer.turns, trailer.effects, dropped, left)


def _arguments(turn: ArchivedTurn) -> list[str | bytes | int]:
    failure = turn.failure
    earlier = [as_record(one) for one in turn.earlier or ()]
    return [
        turn.hash,
        as_record(turn.body),
        as_record(turn.reply),
        as_record(turn.trace),
        failure.kind if failure else "",
        as_record(failure.record) if failure else b"",
        turn.waiter or "",
        turn.left or "",
        len(earlier),
        *earlier,
    ]


def _portions(
    arguments: list[list[str | bytes | int]],
) -> Iterator[list[list[str | bytes | int]]]:
    """Parts of a batch that one call may carry; the first of it always."""
    some: list[list[str | bytes | int]] = []
    size = 0
    for one in arguments:
        length = sum(len(part) for part in one if not isinstance(part, int))
        if some and size + length > BATCH_BYTES:
            yield some
            some, size = [], 0
        some.append(one)
        size += length
    if some:
        yield some


async def _off_loop(batches: Iterator[Item]) -> AsyncIterator[Item]:
    while (batch := await _in_thread(lambda: next(batches, None))) is not None:
        yield batch


async def _in_thread(work: Callable[[], Item]) -> Item:
    """Files are read, written and compressed off the loop, which has a lease to renew."""
    return await asyncio.to_thread(work)
