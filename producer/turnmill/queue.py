"""Turns into the queue: ENQUEUE, CANCEL, and how much is waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from redis.asyncio import Redis

from turnmill.keys import Keys
from turnmill.scripts import CANCEL, ENQUEUE, FORGET, SETTLE, TEND, call

State = Literal["answered", "failed", "cancelled", "deadline", "queued", "running", "unknown"]

LEAST_WEIGHT, GREATEST_WEIGHT = 0.001, 1000.0
"""Of a run. Beyond them virtual times grow until a turn adds nothing to them, and sharing is over for all."""
BATCH_TURNS = 500
BATCH_BYTES = 4 << 20
"""What one ENQUEUE carries at most, so that Redis is never busy long with one call."""
LOOKED_AT = 1000
TEND_TURNS = 100
FORGET_TURNS = 100
"""What one FORGET takes at most: some 3 ms."""


@dataclass(frozen=True)
class Draw:
    """Which draw an ask is for, where Redis remembers draws until their answers are given.

    `base`: what tells apart what is drawn. `scope`: within which draws are told apart (names of runs and attempts are
    part of it). `owner`: `GATEWAY.REQUEST`; an owner that asks again has the same draw. `number`: the draw's. `counted`:
    how often the base was drawn in the scope before; then `number` is a guess. `again`: not the first ask for it: a
    draw that nobody waits for any more, if there is one.
    """

    scope: str
    base: str
    owner: str
    number: int
    counted: bool = False
    again: bool = False

    @property
    def flags(self) -> str:
        return "d" + "k" * self.counted + "o" * self.again


@dataclass(frozen=True)
class Ask:
    """One turn asked for. `body` is the stored form (wire.encode_turn), or empty for a poll.

    `fresh`: asked for anew, which undoes an earlier cancel or failure. `going`: the next turn of a
    conversation that is under way. `retry_failed`: ask again even what failed for good. `stream`: tell of the
    answer while it grows. `draw`: which draw of it, if Redis is to say.
    """

    hash: str
    body: bytes = b""
    fresh: bool = True
    going: bool = False
    retry_failed: bool = False
    stream: bool = False
    draw: Draw | None = None

    @property
    def flags(self) -> str:
        plain = "f" * self.fresh + "g" * self.going + "r" * self.retry_failed + "s" * self.stream
        return plain + self.draw.flags if self.draw else plain


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

    async def enqueue(
        self, model: str, asks: Sequence[Ask], lane: Lane
    ) -> tuple[str, list[State | int]]:
        """Ask for a batch of turns of one model, at most BATCH_TURNS. Returns the stream position to read
        from and a state per ask; or the number of the draw, where it is another one: nothing was asked then."""
        args: list[str | bytes | int] = [
            lane.run,
            str(lane.priority),
            repr(lane.weight),
            int((lane.deadline or 0) * 1000),
        ]
        for ask in asks:
            args += (ask.hash, ask.flags, ask.body)
            if ask.draw:
                args += (ask.draw.scope, ask.draw.base, ask.draw.owner, ask.draw.number)
        position, *states = await call(self._redis, ENQUEUE, self._prefixes(model), args)
        return position.decode(), [
            state if isinstance(state, int) else cast(State, state.decode()) for state in states
        ]

    async def settle(self, draw: Draw, *, delivered: bool) -> bool:
        """The answer of a draw is about to be given to its owner; or its owner waits no more. False: it is another
        owner's by now."""
        how = "delivered" if delivered else "left"
        args = [draw.scope, draw.base, draw.owner, how]
        return bool(await call(self._redis, SETTLE, self._prefixes(""), args))

    async def tend(
        self,
        model: str,
        held: Sequence[tuple[str, str]] = (),
        spent: Sequence[tuple[str, str]] = (),
        *,
        patience: float,
        keep: float,
    ) -> bool:
        """Turns of a model outside a run, each a hash and the lane that it was asked in: somebody waits for these now
        (`held`), nobody will any more for those (`spent`). Cancels what nobody has waited for, for `patience` seconds,
        and lets go of what was spent `keep` seconds ago. Returns whether there may be more to do."""
        args: list[str | int] = [int(patience * 1000), int(keep * 1000)]
        for turns, how in ((held, "held"), (spent, "spent")):
            for hash, lane in turns:
                args += (hash, lane, how)
        counts = await call(self._redis, TEND, self._prefixes(model), args)
        return any(count >= TEND_TURNS for count in counts)

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
