"""Answers kept while they grow: every few seconds a worker stores what its turns have got since, so that a worker
that dies at minute 26 of 27 costs seconds. The engines' side is engines/kept.py."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError

from turnmill.faults import passes
from turnmill.keys import Keys
from turnmill.reply import EngineIdentity
from turnmill.scripts import call
from turnmill_worker.claim import Claim
from turnmill_worker.engines.base import Progress
from turnmill_worker.engines.kept import Part
from turnmill_worker.exchange import BACK_OFF, FAULTS
from turnmill_worker.scripts import KEEP

log = logging.getLogger("turnmill.worker")

GROUP_BYTES = 4 << 20

_HEAD = struct.Struct("<II")


class Growing(Protocol):
    """A turn in the engine. `kept`: how many of its tokens Redis has (None: nothing was sent yet)."""

    claim: Claim
    progress: Progress
    kept: int | None


@dataclass(frozen=True)
class _News:
    of: Growing
    part: Part

    @property
    def args(self) -> list[str | bytes | int]:
        claim, part = self.of.claim, self.part
        data = _HEAD.pack(part.offset, part.length) + part.data
        return [claim.hash, claim.token, part.offset, part.length, data]


class Keeper:
    """Keeps the growing answers of one worker. `turns`: those in the engine now."""

    def __init__(
        self,
        redis: Callable[[], Redis],
        keys: Keys,
        model: str,
        identity: EngineIdentity,
        turns: Callable[[], Iterable[Growing]],
    ) -> None:
        self._redis, self._keys, self._turns = redis, keys, turns
        self._prefixes = [keys.prefix, keys.queue(model)]
        self._identity = identity.model_dump_json(exclude_none=True)

    async def run(self, interval: float) -> None:
        """Keep what has grown, every `interval` seconds. While Redis is away or full, nothing is kept."""
        while True:
            await asyncio.sleep(interval)
            try:
                await self.keep()
            except FAULTS as error:
                log.log(
                    logging.DEBUG if passes(error) else logging.ERROR,
                    "growing answers cannot be kept now: %s",
                    error,
                )

    async def keep(self) -> None:
        """Keep what has grown, now. Raises what Redis raises; what was not kept is sent next time."""
        group: list[_News] = []
        size = 0
        for turn in self._turns():
            part = self._news(turn)
            if part is None:
                continue
            group.append(_News(turn, part))
            size += len(part.data)
            if size > GROUP_BYTES:
                await self._send(group)
                group, size = [], 0
        if group:
            await self._send(group)

    def _news(self, turn: Growing) -> Part | None:
        if turn.progress.growing is None:
            return None
        offset = turn.progress.resumed_at if turn.kept is None else turn.kept
        try:
            part = turn.progress.growing(offset)
        except Exception:
            log.exception("turn %s cannot be kept while it grows", turn.claim.hash[:12])
            turn.progress.growing = None
            return None
        return part if part.length else None

    async def _send(self, group: list[_News]) -> None:
        args = [self._identity, *(arg for news in group for arg in news.args)]
        try:
            kept = await call(self._redis(), KEEP, self._prefixes, args)
        except OutOfMemoryError:
            return  # answers need the room more
        for news, count in zip(group, kept, strict=True):
            if count >= 0:
                news.of.kept = count

    async def read(self, hash: str) -> list[Part]:
        """What an earlier try has kept of a turn's answer, if it was made by an engine like this one. Waits while
        Redis is away."""
        while True:
            try:
                record = await self._redis().lrange(self._keys.partial(hash), 0, -1)  # type: ignore[misc]
                break
            except FAULTS:
                await asyncio.sleep(BACK_OFF)
        if not record or record[0].decode() != self._identity:
            return []
        return [_part(data) for data in record[1:]]


def _part(data: bytes) -> Part:
    offset, length = _HEAD.unpack_from(data)
    return Part(offset, length, data[_HEAD.size :])
