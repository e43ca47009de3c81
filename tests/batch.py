"""Turns that are asked for together, and what becomes of them while workers are hurt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Self

from tests.processes import SimWorker, until_async

from turnmill.client import Client
from turnmill.reply import Trace
from turnmill.turn import Message, Turn
from turnmill_worker.audit import Audit, audit

MODEL = "sim"
HASHING = ("--answer", "history-hash")
"""For the engine: what must come back is known beforehand."""


class Batch:
    def __init__(self, client: Client, turns: list[Turn]) -> None:
        self.client, self.turns = client, turns

    @classmethod
    async def asked(cls, client: Client, texts: Iterable[str], model: str = MODEL) -> Self:
        turns = [Turn(model=model, messages=[Message(role="user", content=t)]) for t in texts]
        await client.submit_many(turns)
        return cls(client, turns)

    @property
    def hashes(self) -> list[str]:
        return [turn.hash for turn in self.turns]

    async def answered(self, seconds: float = 60) -> None:
        await self.client.wait_many(self.hashes, seconds)

    async def audit(self) -> Audit:
        return await audit(
            self.client.store.redis, self.client.farm.keys, self.turns, self.client.lane.run
        )

    async def traces(self) -> list[Trace]:
        """In the order of the turns."""
        found = [await self.client.trace(hash) for hash in self.hashes]
        assert None not in found
        return [trace for trace in found if trace is not None]

    async def cancel(self) -> None:
        await self.client.cancel(self.hashes)


async def holders(client: Client) -> Counter[str]:
    """How many turns each worker, by id, holds now."""
    redis, keys = client.store.redis, client.farm.keys
    leased = await redis.zrange(keys.leases(MODEL), 0, -1)
    owners = await redis.hmget(keys.owners(MODEL), leased) if leased else []
    return Counter(owner[:8].decode() for owner in owners if owner)


async def held(client: Client, expected: dict[str, int]) -> None:
    """Wait until these workers hold so many turns, and no others any."""

    async def as_expected() -> bool:
        return await holders(client) == expected

    await until_async(as_expected, f"turns are held like this: {expected}")


async def id_of(client: Client, worker: SimWorker) -> str:
    """The id of a worker that has registered."""
    (id,) = [info.id for info in await client.store.workers() if info.pid == worker.pid]
    return id


async def says(client: Client, worker: SimWorker, **expected: object) -> None:
    """Wait until a worker says this of itself."""

    async def does() -> bool:
        infos = [info for info in await client.store.workers() if info.pid == worker.pid]
        return any(
            all(getattr(info, name) == value for name, value in expected.items()) for info in infos
        )

    await until_async(does, f"the worker says {expected}")
