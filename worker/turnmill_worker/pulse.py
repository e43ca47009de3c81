"""Whether the engine lives: a lease means progress."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable

from turnmill_worker.engines.base import Engine, EngineAway, EngineDied, Progress

log = logging.getLogger("turnmill.worker")

CHECK_SECONDS = 1.0
HEALTH_TIMEOUT = 10.0


class Pulse:
    """Watches one engine from the worker's loop; read from any thread.

    The engine lives while this loop ticks and either tokens come or `healthy()` says so. `away`: why it cannot be
    reached for now, which is no death; whoever learns of it first writes it here.
    """

    def __init__(self, engine: Engine, progresses: Callable[[], Iterable[Progress]]) -> None:
        self._engine, self._progresses = engine, progresses
        self._lived = math.inf  # nobody has watched it yet
        self._tokens = 0
        self.away = ""

    def age(self) -> float:
        """Seconds since the engine was last seen alive; 0 as long as nobody has watched it."""
        return max(0.0, time.monotonic() - self._lived)

    async def watch(self, on_death: Callable[[str], None]) -> None:
        """Run until cancelled, or until the engine has died: then `on_death` is told why."""
        self._lived = time.monotonic()
        while True:
            tokens = sum(progress.tokens for progress in self._progresses())
            moved, self._tokens = tokens != self._tokens, tokens
            try:
                well = await asyncio.wait_for(self._engine.healthy(), HEALTH_TIMEOUT)
                if well:
                    self.away = ""
                if well or moved:
                    self._lived = time.monotonic()
            except EngineDied as error:
                on_death(str(error))
                return
            except EngineAway as error:
                self.away, self._lived = str(error), time.monotonic()
            except TimeoutError:
                if moved:
                    self._lived = time.monotonic()
                else:
                    log.warning("the engine has not answered a health check for %.0f s", self.age())
            await asyncio.sleep(CHECK_SECONDS)
