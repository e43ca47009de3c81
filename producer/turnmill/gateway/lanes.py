"""One Client for each lane (a run, or a key's turns outside a run), shared by all requests of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from turnmill.client import Client
from turnmill.gateway.settings import GatewaySettings

IDLE_SECONDS = 60.0


@dataclass
class _Shared:
    client: Client
    users: int = 0
    left: float = field(default_factory=time.monotonic)


class Lanes:
    """Opens Clients when they are asked for, and closes those that nobody uses."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._shared: dict[str, _Shared] = {}

    @asynccontextmanager
    async def client(self, lane: str) -> AsyncIterator[Client]:
        shared = self._shared.get(lane)
        if shared is None:
            farm = self._settings.farm
            client = Client(
                farm.url,
                namespace=farm.namespace,
                run=lane,
                deadline=self._settings.deadline,
                patience=self._settings.patience,
            )
            shared = self._shared[lane] = _Shared(client)
        shared.users += 1
        try:
            yield shared.client
        finally:
            shared.users -= 1
            shared.left = time.monotonic()

    async def keep_tidy(self) -> None:
        """Close what was idle for a while; runs until it is cancelled."""
        while True:
            await asyncio.sleep(IDLE_SECONDS / 4)
            long_ago = time.monotonic() - IDLE_SECONDS
            for lane, shared in list(self._shared.items()):
                if not shared.users and shared.left < long_ago:
                    del self._shared[lane]
                    await shared.client.close()

    async def close(self) -> None:
        for shared in self._shared.values():
            await shared.client.close()
        self._shared.clear()
