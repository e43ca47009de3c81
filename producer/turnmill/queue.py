"""Turns into the queue: ENQUEUE, CANCEL, and how much is waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from redis.asyncio import Redis

from turnmill.keys import Keys
from turnmill.scripts import CANCEL, ENQUEUE, FORGET, call

State = Literal["answered", "failed", "cancelled", "deadline", "queued", "running", "unknown"]

LEAST_WEIGHT, GREATEST_WEIGHT = 0.001, 1000.0
"""Of a run. Beyond them virtual times grow until a turn adds nothing to them, and sharing is over for all."""
BATCH_TURNS = 500
BATCH_BYTES = 4 << 20
"""What one ENQUEUE carries at most, so that Redis is never busy long with one call."""
LOOKED_AT = 1000
FORGET_TURNS = 100
"""What one FORGET takes at most: some 3 ms."""


@dataclass(frozen=True)
class Ask:
    """One turn asked for. `body` is the stored form (wire.encode_turn), or empty for a poll.

    `fresh`: asked for anew, which undoes an earlier cancel or failure. `going`: the next turn of a
    conversation that is under way. `retry_failed`: ask again even what failed for good. `stream`: tell of the
    answer while it grows.
    """

    hash: str
    body: bytes = b""
    fresh: bool = True
    going: bool = False
    retry_failed: bool = False
    stream: bool = False

    @property
    def flags(self) -> str:
        return "f" * self.fresh + "g" * self.going + "r" * self.retry_failed + "s" * self.stream


@dataclass(frozen=True)
class Lane:
    """How a run's turns are ordered beside others'. `priority`: 0 to 9, larger first.
    `weight`: this run's share beside runs of the same priority. `deadline`: seconds until a turn is given
    up (None: never)."""

    run: str
    priority: int = 5
    weight: float = 1.0
    deadline: float | None = None


@dataclass(frozen=True)
class Depth:
    """Turns of one model. `queued` counts hints: a turn that several runs want counts for each. `newer`: those
    of the `due` ones that live workers cannot read, because a newer turnmill wrote them."""

    queued: int
    running: int
    due: int
    suspects: int
    newer: int = 0


class Queue:
    """The queue of one namespace, as producers see it. Raises redis-py's errors as they are."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis, self._keys = redis, keys

    async def enqueue(self, model: str, asks: Sequence[Ask], lane: Lane) -> tuple[str, list[State]]:
        """Ask for a batch of turns of one model, at most BATCH_TURNS. Returns the stream position to read
        from and a state per ask."""
        args: list[str | bytes | int] = [
            lane.run,
            str(lane.priority),
            repr(lane.weight),
            int((lane.deadline or 0) * 1000),
        ]
        for ask in asks:
            args += (ask.hash, ask.flags, ask.body)
        position, *states = await call(self._redis, ENQUEUE, self._prefixes(model), args)
        return position.decode(), cast(list[State], [state.decode() for state in states])

    async def cancel(self, model: str, run: str, hashes: Sequence[str] = ()) -> int:
        """A run leaves turns of a model: these, or all. Others that want them keep them."""
        return int(await call(self._redis, CANCEL, self._prefixes(model), [run, *hashes]))

    async def forget(
        self, model: str, meant: Sequence[tuple[str, str]], run: str = ""
    ) -> list[int]:
        """Drop stored answers of turns of one model, at most FORGET_TURNS; the turns are not asked any more.

        `meant`: hash, and SHA-1 (hex) of the stored reply, or of the stored failure where there is no reply:
        another record stays. Empty: whatever is there. `run`: only this run lets go, and what others hold
        stays; else the answer goes, whoever holds it.

        Returns per hash: 1 dropped; 2 the run has let go, without that; 0 nothing was done, because the
        turn is open, or not the run's, or its record is another one.
        """
        args = [part for pair in meant for part in pair]
        return list(await call(self._redis, FORGET, self._prefixes(model), [run, *args]))

    async def forget_rest(self, run: str) -> bool:
        """Remove what a run leaves behind that has let go of all its turns. False: it has some left."""
        return bool(await call(self._redis, FORGET, self._prefixes(""), [run]))

    async def depth(self, model: str) -> Depth:
        keys, queued = self._keys, 0
        for raw in await self._redis.hkeys(keys.classes(model)):  # type: ignore[misc]
            priority = raw.decode()
            runs = await self._redis.zrange(keys.ready(model, priority), 0, -1)
            pipe = self._redis.pipeline(transaction=False)
            for run in runs:
                pipe.llen(keys.going(model, priority, run.decode()))
                pipe.llen(keys.new(model, priority, run.decode()))
            queued += sum(await pipe.execute())
        pipe = self._redis.pipeline(transaction=False)
        for key in (keys.leases(model), keys.due(model), keys.suspects(model)):
            pipe.zcard(key)
        running, due, suspects = await pipe.execute()
        newer = await self._left_to_newer(model) if due else 0
        return Depth(queued, running, due, suspects, newer)

    async def _left_to_newer(self, model: str) -> int:
        """How many turns that are due later were last left to a newer worker; of the first thousand."""
        hashes = await self._redis.zrange(self._keys.due(model), 0, LOOKED_AT - 1)
        pipe = self._redis.pipeline(transaction=False)
        for hash in hashes:
            pipe.hget(self._keys.tries(hash.decode()), "log")
        logs = await pipe.execute()
        return sum(b'"newer"' in log.rpartition(b"{")[2] for log in logs if log)

    def _prefixes(self, model: str) -> list[str]:
        return [self._keys.prefix, self._keys.queue(model)]
