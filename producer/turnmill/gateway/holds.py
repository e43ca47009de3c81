"""Turns outside a run are held for as long as a client waits for them.

A hold that no gateway renews, because the client has hung up or the gateway was killed, ends after a while: then any
gateway cancels the turn. Answers that were given are let go later, so that they do not fill Redis.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter

from redis.asyncio import Redis
from redis.exceptions import RedisError

from turnmill.errors import TurnmillError
from turnmill.faults import patiently
from turnmill.gateway.settings import GatewaySettings
from turnmill.queue import Queue
from turnmill.store import Store

log = logging.getLogger("turnmill.gateway")

BATCH = 500

Held = tuple[str, str, str]
"""Model, hash, lane."""


class Holds:
    """The holds of one gateway."""

    def __init__(self, redis: Redis, settings: GatewaySettings) -> None:
        self._settings = settings
        self._queue = Queue(redis, settings.farm.keys)
        self._store = Store(redis, settings.farm.keys)
        self._held: Counter[Held] = Counter()
        self._renewed, self._lapsed = time.monotonic(), -math.inf

    async def hold(self, held: Held) -> None:
        """Somebody here waits for this turn from now on."""
        model, hash, lane = held
        self._held[held] += 1
        try:
            await patiently(
                lambda: self._tend(model, [(hash, lane)], []),
                patience=self._settings.patience,
                doing="holding a turn",
            )
        except BaseException:
            self.let_go(held)
            raise

    def let_go(self, held: Held) -> None:
        """One of those who waited here waits no more."""
        self._held[held] -= 1
        if self._held[held] <= 0:
            del self._held[held]

    def lapsed(self, since: float) -> bool:
        """Whether holds may have ended since then (`time.monotonic`) although somebody waited here, because this process or
        Redis stood still."""
        self._notice()
        return self._lapsed >= since

    async def spent(self, held: Held) -> None:
        """The turn has ended, and all who wait for it hear so."""
        model, hash, lane = held
        await self._tend(model, [], [(hash, lane)])

    async def keep_up(self) -> None:
        """Renew what is held here, and see to what is held by nobody; runs until it is cancelled."""
        while True:
            await asyncio.sleep(self._settings.orphan / 3)
            self._notice()
            try:
                await self._round()
                self._renewed = time.monotonic()
            except (RedisError, OSError, TurnmillError) as error:
                log.warning("turns outside a run cannot be seen to now: %s", error)

    def _notice(self) -> None:
        now = time.monotonic()
        if now - self._renewed > self._settings.orphan * 2 / 3:
            self._lapsed = now

    async def _round(self) -> None:
        by_model: dict[str, list[tuple[str, str]]] = {m: [] for m in await self._store.models()}
        for model, hash, lane in self._held:
            by_model.setdefault(model, []).append((hash, lane))
        for model, held in by_model.items():
            for start in range(0, len(held), BATCH):
                await self._tend(model, held[start : start + BATCH], [])
            more = True
            while more:
                more = await self._tend(model, [], [])

    async def _tend(
        self, model: str, held: list[tuple[str, str]], spent: list[tuple[str, str]]
    ) -> bool:
        settings = self._settings
        return await self._queue.tend(
            model, held, spent, patience=settings.orphan, keep=settings.keep
        )
