"""Reading answers while they grow.

Workers tell of all streamed answers of a model in one Redis stream, which one `Listener` follows for thousands of readers.
It holds the last seconds only: who comes later, or has missed something, reads what there is of an answer (one GET) and
goes on from there. Positions are bytes of UTF-8, and every piece is whole characters.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from turnmill.errors import StreamBroken
from turnmill.faults import passes, translate
from turnmill.keys import Keys
from turnmill.tasks import end_tasks

log = logging.getLogger("turnmill.client")

LINE_LENGTH: Final = 24
"""Characters of the name of a line: what tries that go on from each other tell (worker: telling.py)."""

_BLOCK_MS: Final = 1000
_READ: Final = 1000
_CAUGHT_UP: Final = 200
_BACK_OFF: Final = 0.1


@dataclass(frozen=True)
class Delta:
    """A piece of an answer's content, which goes on from the pieces before it."""

    content: str


class Reading:
    """What one reader has of one turn's answer. `wake`: call it to have the reader look again."""

    def __init__(self, hash: str) -> None:
        self.hash = hash
        self.behind = True
        self._line, self._text, self._taken = b"", bytearray(), 0
        self._error: Exception | None = None
        self._news = asyncio.Event()

    # The reader's side

    async def wait(self) -> None:
        """Until there is something to take, or `wake` was called."""
        await self._news.wait()
        self._news.clear()

    def wake(self, *_: object) -> None:
        self._news.set()

    def take(self) -> str:
        """What is new, perhaps nothing. Raises StreamBroken."""
        if self._taken < len(self._text):
            new = self._text[self._taken :].decode()
            self._taken = len(self._text)
            return new
        if self._error is not None:
            raise self._error
        return ""

    def check(self, content: str) -> None:
        """Raises StreamBroken if this is not the content of which the beginning was read."""
        if not content.encode("utf-8", "replace").startswith(self._text):
            raise _broken(self.hash)

    # The listener's side

    def hear(self, line: bytes, at: int, text: bytes) -> None:
        """The text of a line from byte `at` on: in its order, but perhaps again, or with something missing before it."""
        if self._error is not None:
            return
        if line != self._line:
            if self._text:
                self.fail(_broken(self.hash))
                return
            self._line = line
        have = len(self._text)
        if at > have:
            self.behind = True
            return
        again = text[: have - at]
        if self._text[at : at + len(again)] != again:  # Redis has lost what we have heard
            self.fail(_broken(self.hash))
        elif len(again) < len(text):
            self._text += text[len(again) :]
            self.wake()

    def fail(self, error: Exception) -> None:
        self._error = error
        self.wake()


class Listener:
    """Follows what the workers of one model tell, for all who read along in this process."""

    def __init__(self, redis: Redis, keys: Keys, model: str) -> None:
        self._redis, self._keys, self._stream = redis, keys, keys.told(model)
        self._readings: dict[bytes, list[Reading]] = {}
        self._position: str | None = None
        self._follower: asyncio.Task[None] | None = None
        self._catcher: asyncio.Task[None] | None = None

    def open(self, hash: str) -> Reading:
        """Read a turn's answer from now on, and what there is of it."""
        reading = Reading(hash)
        self._readings.setdefault(hash.encode(), []).append(reading)
        if self._follower is None or self._follower.done():
            self._position = None
            self._follower = asyncio.create_task(self._follow())
        elif self._position is not None:
            self._catch_up()
        return reading

    def close(self, reading: Reading) -> None:
        hash = reading.hash.encode()
        of_turn = self._readings[hash]
        of_turn.remove(reading)
        if not of_turn:
            del self._readings[hash]

    async def end(self) -> None:
        await end_tasks([self._follower, self._catcher])

    async def _follow(self) -> None:
        """Until nobody reads any more."""
        while self._readings:
            try:
                if self._position is None:
                    # Before anything is read: what is told after that is heard.
                    last = await self._redis.xrevrange(self._stream, count=1)
                    self._position = last[0][0].decode() if last else "0-0"
                    self._catch_up()
                streams = await self._redis.xread(
                    {self._stream: self._position}, count=_READ, block=_BLOCK_MS
                )
                for _, entries in streams:
                    for position, told in entries:
                        self._position = position.decode()
                        self._hear(told)
            except (RedisError, OSError) as error:
                await self._outlive(error)

    async def _outlive(self, error: Exception) -> None:
        if isinstance(error, RedisError) and not passes(error):
            for reading in self._all():
                reading.fail(translate(error))
        for reading in self._all():
            reading.behind = True
        await asyncio.sleep(_BACK_OFF)
        self._catch_up()

    def _hear(self, told: dict[bytes, bytes]) -> None:
        behind = False
        for hash in told.keys() & self._readings.keys():
            line, rest = told[hash][:LINE_LENGTH], told[hash][LINE_LENGTH:]
            at, _, text = rest.partition(b" ")
            for reading in self._readings[hash]:
                reading.hear(line, int(at), text)
                behind = behind or reading.behind
        if behind:
            self._catch_up()

    def _all(self) -> list[Reading]:
        return [reading for of_turn in self._readings.values() for reading in of_turn]

    # Who is behind

    def _catch_up(self) -> None:
        if self._catcher is None or self._catcher.done():
            self._catcher = asyncio.create_task(self._catch_all_up())

    async def _catch_all_up(self) -> None:
        while behind := [reading for reading in self._all() if reading.behind][:_CAUGHT_UP]:
            for reading in behind:
                reading.behind = False  # or what is heard meanwhile would not count
            names = [self._keys.told_of(reading.hash) for reading in behind]
            try:
                found = await self._redis.mget(names)
            except (RedisError, OSError) as error:
                await self._outlive(error)
                continue
            for reading, text in zip(behind, found, strict=True):
                if text is not None:
                    reading.hear(text[:LINE_LENGTH], 0, text[LINE_LENGTH:])


def _broken(hash: str) -> StreamBroken:
    return StreamBroken(
        f"turn {hash[:12]}: its answer does not go on from what was streamed; it goes on without"
    )
