"""The queue by hand: the scripts called directly, with clocks set instead of waited for."""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis

from turnmill.queue import Ask, Lane, Queue, State
from turnmill.reply import Failure, FailureKind, Reply, Trace
from turnmill.scripts import call
from turnmill.settings import Farm
from turnmill.store import RunInfo, Store
from turnmill.turn import Message
from turnmill.wire import encode
from turnmill_worker.claim import Claim, Finish, read_claims, requeue
from turnmill_worker.scripts import CLAIM, FINISH, RECOVER, RENEW

MODEL = "m"
LONG_AGO = 1
"""Milliseconds since 1970: before any time that a server says."""


def h(name: str) -> str:
    """The hash of a turn that is known to a test by a short name."""
    return hashlib.sha256(name.encode()).hexdigest()


@dataclass
class Taken:
    """What one CLAIM brought."""

    claims: list[Claim]
    more: bool
    drain: bool

    @property
    def hashes(self) -> list[str]:
        return [claim.hash for claim in self.claims]


@dataclass
class Hand:
    """A worker that does only what it is told to. `held`: its claims by hash."""

    farm: ByHand
    id: str
    claims: int = 0
    held: dict[str, Claim] = field(default_factory=dict)

    def next_token(self) -> str:
        self.claims += 1
        return f"{self.id}{self.claims:016x}"

    async def claim(
        self,
        want: int = 10,
        *,
        token: str = "",
        room: int = 4 << 20,
        holding: int | None = None,
    ) -> Taken:
        token = token or self.next_token()
        holding = len(self.held) if holding is None else holding
        answer = await self.farm.script(CLAIM, token, want, holding, room)
        claims = read_claims(token, answer)
        self.held |= {claim.hash: claim for claim in claims}
        return Taken(claims, bool(answer[0]), bool(answer[1]))

    async def take(self, *names: str) -> list[Claim]:
        """Claims, and sees that it is these turns, in this order."""
        taken = await self.claim(len(names))
        assert taken.hashes == [h(name) for name in names]
        return taken.claims

    async def take_one(self, name: str) -> Claim:
        return (await self.take(name))[0]

    async def renew(self) -> tuple[list[str], list[str], bool]:
        """What is lost, what nobody wants, and whether there is more upkeep to do."""
        held = [part for claim in self.held.values() for part in (claim.hash, claim.token)]
        lost, unwanted, again, _ = await self.farm.script(RENEW, *held)
        return [hash.decode() for hash in lost], [hash.decode() for hash in unwanted], bool(again)

    async def answer(self, claim: Claim, text: str = "") -> int:
        reply = Reply(
            hash=claim.hash,
            message=Message(role="assistant", content=text or f"{self.id}'s"),
            finish_reason="stop",
        )
        trace = Trace(hash=claim.hash, worker=self.id, outcome="completed", earlier=claim.earlier)
        return await self.finish(
            Finish(claim.hash, claim.token, "ok", "", encode(reply), encode(trace))
        )

    async def fail(self, claim: Claim, kind: FailureKind = "engine_error") -> int:
        failure = Failure(hash=claim.hash, kind=kind, text=f"{self.id} failed")
        trace = Trace(hash=claim.hash, worker=self.id, outcome="failed", earlier=claim.earlier)
        return await self.finish(
            Finish(claim.hash, claim.token, "fail", kind, encode(failure), encode(trace))
        )

    async def give_back(self, claim: Claim, reason: str = "drain", delay: float = 0) -> int:
        return await self.finish(requeue(claim, reason, delay))

    async def let_go(self, claim: Claim) -> int:
        return await self.finish(Finish(claim.hash, claim.token, "cancelled"))

    async def die(self) -> None:
        """With all that it holds: its leases lapse."""
        held = list(self.held)
        await self.farm.lapse(*held)
        while (await self.farm.hand().renew())[2]:
            pass
        self.held.clear()

    async def finish(self, *finished: Finish) -> int:
        """FINISH; returns its word on the first turn."""
        results = await self.farm.script(FINISH, *(part for item in finished for part in item))
        for item in finished:
            claim = self.held.get(item.hash)
            if claim is not None and claim.token == item.token:
                del self.held[item.hash]
        return int(results[0])

    async def recover(self, token: str) -> int:
        return int(await self.farm.script(RECOVER, token))


class ByHand:
    """One model's queue. Turns are known by short names; their bodies are their names."""

    def __init__(self, redis: Redis, farm: Farm, model: str = MODEL) -> None:
        self.redis, self.farm, self.model, self.keys = redis, farm, model, farm.keys
        self.queue, self.store = Queue(redis, farm.keys), Store(redis, farm.keys)
        self.prefix = farm.keys.queue(model)

    def hand(self) -> Hand:
        return Hand(self, uuid.uuid4().hex[:8])

    async def script(self, script: Any, *args: Any) -> Any:
        return await call(self.redis, script, [self.keys.prefix, self.prefix], list(args))

    async def enqueue(
        self,
        *names: str,
        run: str = "run",
        priority: int = 5,
        weight: float = 1.0,
        deadline: float | None = None,
        fresh: bool = True,
        going: bool = False,
        retry_failed: bool = False,
        stream: bool = False,
        body: bytes | None = None,
    ) -> list[State]:
        """ENQUEUE. Without `fresh` it is a poll, which has no body unless one is given."""
        asks = [
            Ask(
                h(name),
                (name.encode() if fresh else b"") if body is None else body,
                fresh,
                going,
                retry_failed,
                stream,
            )
            for name in names
        ]
        lane = Lane(run, priority, weight, deadline)
        return (await self.queue.enqueue(self.model, asks, lane))[1]

    async def poll(self, *names: str, run: str = "run") -> list[State]:
        return await self.enqueue(*names, run=run, fresh=False)

    async def cancel(self, *names: str, run: str = "run") -> int:
        return await self.queue.cancel(self.model, run, [h(name) for name in names])

    async def counters(self, run: str = "run") -> RunInfo:
        return next(info for info in await self.store.runs() if info.name == run)

    async def counts(self, run: str = "run") -> tuple[int, int, int, int]:
        """Total, done, failed, cancelled."""
        info = await self.counters(run)
        return info.total, info.done, info.failed, info.cancelled

    async def strikes(self, name: str) -> int:
        return await self.strikes_of(h(name))

    async def strikes_of(self, hash: str) -> int:
        return await self._tries(hash, "strikes")

    async def company_of(self, hash: str) -> int:
        """How many may be tried together with this suspect, itself included."""
        return await self._tries(hash, "company")

    async def _tries(self, hash: str, field: str) -> int:
        return int(await self.redis.hget(f"{self.keys.prefix}t:{hash}", field) or 0)

    async def finished(self) -> list[str]:
        """The hashes in the stream of finished turns, in its order."""
        entries = await self.redis.xrange(self.keys.finished(self.model))
        return [entry[b"h"].decode() for _, entry in entries]

    # The clocks, set

    async def now(self) -> int:
        seconds, micros = await self.redis.time()
        return int(seconds) * 1000 + int(micros) // 1000

    async def lapse(self, *hashes: str) -> None:
        """These leases run out at once, while the farm is alive."""
        await self.redis.zadd(
            self.keys.leases(self.model), dict.fromkeys(hashes, LONG_AGO), xx=True
        )
        await self.seen(0)

    async def seen(self, ago: int) -> None:
        """A worker of this model has called last `ago` ms ago."""
        await self.redis.set(f"{self.prefix}seen", await self.now() - ago)

    async def make_due(self, *hashes: str) -> None:
        await self.redis.zadd(self.keys.due(self.model), dict.fromkeys(hashes, LONG_AGO), xx=True)

    async def wait_long(self, ms: int, *hashes: str) -> None:
        """These suspects, or all, have waited so much longer."""
        suspects = self.keys.suspects(self.model)
        for hash in hashes or await self.redis.zrange(suspects, 0, -1):
            await self.redis.zincrby(suspects, -ms, hash)

    async def end_trial(self, hand: Hand) -> None:
        """The suspects in this worker have lived through their trial."""
        await self.redis.delete(f"{self.prefix}trial:{hand.id}")

    async def strike(self, *names: str, times: int) -> None:
        """Workers die, one after the other, with these turns in them."""
        for _ in range(times):
            hand = self.hand()
            taken = await hand.claim(len(names))
            assert set(taken.hashes) == set(map(h, names))
            for claim in taken.claims:
                await hand.give_back(claim, "death")
