"""A worker's side of one model's queue: what it holds of it, and what it says of itself there.

An engine with LoRA adapters has a name for each, and its worker has a side for each name: to the farm they are models like
any others, each with a queue, leases and a record of its own. What they share is the worker's: its slots, its life and
its engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal

from redis.asyncio import Redis

from turnmill.scripts import call
from turnmill.settings import Farm
from turnmill.store import WorkerInfo
from turnmill_worker.arq_door import ArqDoor
from turnmill_worker.claim import Claim, Company, Finish
from turnmill_worker.counters import Counters
from turnmill_worker.engines.base import Answering, Progress
from turnmill_worker.exchange import Exchanges
from turnmill_worker.lease import Held, LeaseKeeper
from turnmill_worker.progress import Keeper
from turnmill_worker.scripts import REGISTER
from turnmill_worker.telling import Teller

EXPIRY_MS = 10_000
"""How long what a worker first says of itself holds; the lease keeper soon says more."""

Ending = Literal["drain", "unwanted", "lost"]


@dataclass
class Running:
    """One turn in the engine, or about to be: `task` is there once it has begun. `kept`: how many tokens of its
    answer Redis has. `teller`: tells those who read along."""

    claim: Claim
    progress: Progress = field(default_factory=Progress)
    task: asyncio.Task[None] | None = None
    ending: Ending | None = None
    kept: int | None = None
    teller: Teller | None = None

    def end(self, ending: Ending) -> None:
        if self.ending is None:
            self.ending = ending
            # A task that is cancelled before its first step never runs: it would hold its turn for ever.
            if self.task is not None:
                self.task.cancel()


class Side:
    """`taken` is given this side and the turns of each CLAIM; `ended` and `spawn` are as in Exchanges.

    `id`: the worker's, here. `running`: what it holds, by hash.
    """

    def __init__(
        self,
        engine: Answering,
        farm: Farm,
        pool: Callable[[], Redis],
        *,
        taken: Callable[[Side, list[Claim]], Awaitable[None]],
        ended: Callable[[], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self.engine, self.model, self._farm = engine, engine.served_name, farm
        self.id = uuid.uuid4().hex[:8]
        self.running: dict[str, Running] = {}
        self._alone: Running | None = None
        self.counters = Counters()
        self._pool, keys = pool, farm.keys
        self._prefixes = [keys.prefix, keys.queue(self.model)]
        self.exchanges = Exchanges(
            pool,
            self._prefixes,
            self.id,
            taken=lambda claims: taken(self, claims),
            jobs=lambda jobs: ArqDoor(pool(), keys, self.model).tend(jobs),
            ended=ended,
            spawn=spawn,
        )
        self.keeper = Keeper(pool, keys, self.model, engine.identity, self.running_now)

    def running_now(self) -> list[Running]:
        """From any thread."""
        return list(self.running.values())

    @property
    def held(self) -> int:
        """Slots that its turns take, those included that it is asking for."""
        return len(self.running) + self.exchanges.claiming

    @property
    def holds_suspects(self) -> bool:
        return any(r.claim.company is not Company.ANY for r in self.running_now())

    @property
    def needs_no_company(self) -> bool:
        """Whether the engine may get no turns of other names now. Redis sees to the company in this side's queue alone; and
        what was to be alone stays so until it has ended, because a death would convict it as if it had been."""
        alone = self._alone
        is_there = alone is not None and self.running.get(alone.claim.hash) is alone
        return is_there or self.exchanges.drained

    def take(self, claims: list[Claim]) -> list[Running]:
        """Hold these turns from now on."""
        claimed = [Running(claim, Progress(priority=claim.priority)) for claim in claims]
        self.counters.claimed += len(claimed)
        for running in claimed:
            before = self.running.get(running.claim.hash)
            if before is not None:  # its lease had lapsed, and it has come back to us
                before.end("lost")
            if running.claim.company is Company.ALONE:
                self._alone = running
        self.running.update((running.claim.hash, running) for running in claimed)
        return claimed

    def hand_in(self, running: Running, finish: Finish) -> None:
        """A turn has left the engine, and ended like this."""
        claim, progress = running.claim, running.progress
        if self.running.get(claim.hash) is running:
            del self.running[claim.hash]
        self.counters.count(finish, progress.reply)
        self.counters.made += progress.made
        # It may lead back to the progress: a circle, which only the garbage collector would free.
        progress.growing = None
        self.keeper.end(running)
        self.exchanges.finished.append(finish)
        self.exchanges.more = True

    async def register(self, info: WorkerInfo, lease: float) -> float:
        """Say to the farm what this worker is. Returns the farm's lease, in seconds: ours, if it has none yet."""
        args = [int(lease * 1000), info.id, info.model_dump_json(), EXPIRY_MS]
        farms = int(await call(self._pool(), REGISTER, self._prefixes, args)) / 1000
        self.counters.registered = True
        return farms

    def lease_keeper(
        self, lease: float, *, info: Callable[[], WorkerInfo], alive: Callable[[], bool]
    ) -> LeaseKeeper:
        """What will hold its turns; to be called on the worker's loop."""
        loop = asyncio.get_running_loop()
        return LeaseKeeper(
            self._farm,
            self.model,
            lease,
            held=lambda: [(r.claim.hash, r.claim.token) for r in self.running_now()],
            info=info,
            alive=alive,
            renewed=lambda lost, unwanted: _quietly(
                loop.call_soon_threadsafe, self._let_go, lost, unwanted
            ),
            streamed=lambda hashes: _quietly(loop.call_soon_threadsafe, self._stream, hashes),
            counters=self.counters,
        )

    def _let_go(self, lost: Held, unwanted: Held) -> None:
        endings: tuple[tuple[Ending, Held], ...] = (("lost", lost), ("unwanted", unwanted))
        for ending, claims in endings:
            for hash, token in claims:
                running = self.running.get(hash)
                if running is not None and running.claim.token == token:
                    self.counters.lost += ending == "lost" and running.ending is None
                    running.end(ending)

    def _stream(self, hashes: list[str]) -> None:
        for hash in hashes:
            if (running := self.running.get(hash)) is not None:
                self.keeper.stream(running)


def _quietly(call: Any, *args: Any) -> None:
    """Call into a loop that may just have been closed."""
    with contextlib.suppress(RuntimeError):
        call(*args)
