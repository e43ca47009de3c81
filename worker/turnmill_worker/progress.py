"""Answers kept while they grow: every few seconds a worker stores what its turns have got since, so that a worker
that dies at minute 26 of 27 costs seconds. Answers that somebody reads along are kept as they come, because only what
is kept is told (telling.py). The engines' side is engines/kept.py."""

from __future__ import annotations

import asyncio
import contextlib
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
from turnmill_worker.telling import NOTHING, Teller, Telling

log = logging.getLogger("turnmill.worker")

GROUP_BYTES = 4 << 20
GROUP_TURNS = 500

TELL_SECONDS = 0.05
"""Between two tellings; longer if the last one took longer, because Redis is busy. The first one after a silence waits
for nothing, nor do an answer's first words: whoever reads looks at how soon they come."""
FIRST_SECONDS = 0.005
"""Between two looks for first words, at least: tokens that are no whole character yet may be many."""

_HEAD = struct.Struct("<II")


class Growing(Protocol):
    """A turn in the engine. `kept`: how many of its tokens Redis has (None: nothing was sent yet). `teller`: tells
    readers of it (None: nobody reads along)."""

    claim: Claim
    progress: Progress
    kept: int | None
    teller: Teller | None


@dataclass(frozen=True)
class _News:
    of: Growing
    part: Part
    telling: Telling

    @property
    def size(self) -> int:
        return len(self.part.data) + len(self.telling.text)

    @property
    def args(self) -> list[str | bytes | int]:
        claim, part, telling = self.of.claim, self.part, self.telling
        data = _HEAD.pack(part.offset, part.length) + part.data
        kept = (claim.hash, claim.token, part.offset, part.length, data)
        return [*kept, telling.line, telling.at, telling.text]


class Keeper:
    """Keeps the growing answers of one worker, and tells of those that somebody reads along. `turns`: those in the
    engine now."""

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
        self._streamed: dict[str, Growing] = {}
        # Calls that overtake each other could leave less kept than was told.
        self._one_by_one = asyncio.Lock()
        self._heard = asyncio.Event()
        self._first = asyncio.Event()  # heard of an answer of which nothing is told

    async def run(self, interval: float) -> None:
        """Keep what has grown, every `interval` seconds. While Redis is away or full, nothing is kept."""
        while True:
            await asyncio.sleep(interval)
            try:
                await self.keep()
            except FAULTS as error:
                _say(error)

    async def keep(self) -> None:
        """Keep what has grown, now. Raises what Redis raises; what was not kept is sent next time."""
        await self._keep(list(self._turns()))

    # Those who read along

    def stream(self, turn: Growing) -> None:
        """Somebody reads this turn's answer while it grows: tell of it, until `end`."""
        if turn.teller is not None:
            return
        loop, heard, first = asyncio.get_running_loop(), self._heard, self._first
        turn.teller = teller = Teller(turn.claim.token, turn.progress)

        def more() -> None:
            # In any thread, at every token: to wake a loop that is awake already would cost much.
            for event in (heard, first) if teller.silent else (heard,):
                if not event.is_set():
                    with contextlib.suppress(RuntimeError):  # the loop is closed
                        loop.call_soon_threadsafe(event.set)

        turn.progress.streamed, turn.progress.heard = True, more
        self._streamed[turn.claim.rid] = turn
        if turn.progress.tokens:
            heard.set()
            first.set()

    def end(self, turn: Growing) -> None:
        """The turn has left the engine."""
        if turn.teller is not None:
            self._streamed.pop(turn.claim.rid, None)
            turn.progress.heard = turn.progress.telling = None

    async def tell(self) -> None:
        """Keep what has grown of streamed answers, and tell it, whenever there is news."""
        while True:
            await self._heard.wait()
            self._heard.clear()
            self._first.clear()
            due = asyncio.get_running_loop().time() + TELL_SECONDS
            await self._tell(self._streamed.values())
            while await self._first_before(due):
                streamed = self._streamed.values()
                await self._tell(turn for turn in streamed if turn.teller and turn.teller.silent)

    async def _tell(self, turns: Iterable[Growing]) -> None:
        """Takes twice as long as Redis does, so that Redis has as much time for others."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            await self._keep(list(turns), told_only=True)
        except FAULTS as error:
            _say(error)
            self._heard.set()
        await asyncio.sleep(max(FIRST_SECONDS, loop.time() - began))

    async def _first_before(self, due: float) -> bool:
        """Waits until an answer begins of which nothing is told, or, in vain, until `due` (by the loop's clock)."""
        try:
            async with asyncio.timeout_at(due):
                await self._first.wait()
        except TimeoutError:
            return False
        self._first.clear()
        return asyncio.get_running_loop().time() < due

    # Sending

    async def _keep(self, turns: list[Growing], *, told_only: bool = False) -> None:
        async with self._one_by_one:
            group: list[_News] = []
            size = 0
            for turn in turns:
                # The text before the tokens: meanwhile there may be more of both, and what is told must be kept.
                telling = self._telling(turn)
                if told_only and not telling.line:
                    continue
                news = _News(turn, self._part(turn), telling)
                if not (news.part.length or telling.line):
                    continue
                group.append(news)
                size += news.size
                if size > GROUP_BYTES or len(group) == GROUP_TURNS:
                    await self._send(group)
                    group, size = [], 0
            if group:
                await self._send(group)

    def _telling(self, turn: Growing) -> Telling:
        if turn.teller is None:
            return NOTHING
        try:
            return turn.teller.news()
        except Exception:
            log.exception("turn %s cannot be told while it grows", turn.claim.hash[:12])
            turn.progress.telling = None
            return NOTHING

    def _part(self, turn: Growing) -> Part:
        offset = turn.progress.resumed_at if turn.kept is None else turn.kept
        if turn.progress.growing is not None:
            try:
                return turn.progress.growing(offset)
            except Exception:
                log.exception("turn %s cannot be kept while it grows", turn.claim.hash[:12])
                turn.progress.growing = turn.progress.telling = None
        return Part(offset, 0, b"")

    async def _send(self, group: list[_News]) -> None:
        args = [self._identity, *(arg for news in group for arg in news.args)]
        try:
            counts = await call(self._redis(), KEEP, self._prefixes, args)
        except OutOfMemoryError:
            return  # answers need the room more
        for news, kept, told in zip(group, counts[::2], counts[1::2], strict=True):
            if kept < 0:
                continue
            if news.part.length or news.of.kept is not None:  # else it is an earlier try's
                news.of.kept = kept
            if news.telling.line and news.of.teller is not None:
                news.of.teller.told(news.telling, told)

    # What earlier tries have left

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

    async def read_told(self, hash: str) -> bytes:
        """What earlier tries have told of a turn's answer, behind the name of its line. Waits while Redis is away."""
        while True:
            try:
                return await self._redis().get(self._keys.told_of(hash)) or b""
            except FAULTS:
                await asyncio.sleep(BACK_OFF)


def _say(error: BaseException) -> None:
    level = logging.DEBUG if passes(error) else logging.ERROR
    log.log(level, "growing answers cannot be kept now: %s", error)


def _part(data: bytes) -> Part:
    offset, length = _HEAD.unpack_from(data)
    return Part(offset, length, data[_HEAD.size :])
