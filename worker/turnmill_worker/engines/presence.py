"""Whether a server is there. One that is not is no dead engine: it may be loading its model again, and nobody's turns
should fail for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from turnmill_worker.engines.base import EngineAway
from turnmill_worker.engines.pace import pause

log = logging.getLogger("turnmill.engines.openai")

_QUIET_SECONDS = 15.0
"""A server that has requests, and has said nothing for so long, is asked whether it is well."""
_MISSES = 3
"""So many times in a row it must not answer that, before the requests that wait for it are given up."""
_LONGEST_PAUSE = 15.0
"""Seconds between two looks for a server that is away."""


class Presence:
    """Used from one event loop. `name`: the server, for the log. `question` asks it, and gives why it is not there,
    or nothing; `gone` is told when requests are to be given up. `away`: why it is not there."""

    def __init__(
        self, name: str, question: Callable[[], Awaitable[str]], gone: Callable[[str], None]
    ) -> None:
        self.away = ""
        self._name, self._question, self._gone = name, question, gone
        self._asking: asyncio.Task[str] | None = None
        self._heard = self._left = self._look_at = 0.0
        self._looks = self._misses = 0

    def heard(self) -> None:
        """The server has said something just now."""
        self._heard = time.monotonic()

    async def confirm(self) -> None:
        """A request has failed. Raises EngineAway if the server is not there."""
        if not self.away and (why := await self._ask()):
            self.leave(why)
        if self.away:
            raise EngineAway(self.away)

    def leave(self, why: str, seconds: float = 0.0) -> None:
        """It is not there, and is not looked for before so many seconds have passed."""
        if not self.away:
            log.warning(
                "%s is away: %s. Its turns go back, and none are claimed until it is there again",
                self._name,
                why,
            )
            self._left, self._looks = time.monotonic(), 0
        self.away = why
        self._look_at = max(self._look_at, time.monotonic() + seconds)

    async def healthy(self, *, busy: bool) -> bool:
        """Whether it would answer, as far as is known: one that has no requests is not asked. Raises EngineAway."""
        if self.away:
            await self._look()
            if self.away:
                raise EngineAway(self.away)
            return True
        if not busy or time.monotonic() - self._heard < _QUIET_SECONDS:
            return True
        if not (why := await self._ask()):
            self._misses = 0
            self.heard()
            return True
        self._misses += 1
        if self._misses < _MISSES:
            return False
        self._misses = 0
        self.leave(why)
        self._gone(why)
        raise EngineAway(why)

    async def _look(self) -> None:
        if time.monotonic() < self._look_at:
            return
        if why := await self._ask():
            self.away = why
            self._looks += 1
            self._look_at = time.monotonic() + min(pause(self._looks), _LONGEST_PAUSE)
        elif self.away:
            log.info("%s is there again after %.0f s", self._name, time.monotonic() - self._left)
            self.away = ""

    async def _ask(self) -> str:
        """One question at a time, whoever waits for the answer, and however long."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._question())
        return await asyncio.shield(self._asking)
