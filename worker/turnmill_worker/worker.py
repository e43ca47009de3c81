"""TurnWorker: arq's Worker with a queue loop made for long engine calls.

arq gives the life cycle (`run`, `main`, `close`), the hooks and the job context. Claiming many turns in one
script, short renewed leases, fenced group commits and outliving Redis are ours, in `_poll_iteration`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Literal

from arq.connections import ArqRedis
from arq.worker import Worker, func

from turnmill.faults import passes
from turnmill.settings import Farm
from turnmill.store import WorkerInfo
from turnmill.tasks import end_tasks
from turnmill_worker.claim import Claim, Company, Finish, requeue
from turnmill_worker.engines.base import Engine, EngineDied, Progress
from turnmill_worker.exchange import BACK_OFF, FAULTS, Exchanges
from turnmill_worker.job import RETRY_AFTER, answer_turn
from turnmill_worker.lease import Held, LeaseKeeper
from turnmill_worker.pulse import Pulse
from turnmill_worker.settings import WorkerSettings

log = logging.getLogger("turnmill.worker")

ENGINE_DIED = 70
"""Exit code: start me again."""

IDLE_SECONDS = 0.5
"""How long an idle worker sleeps if nobody wakes it. A wake can be lost only with Redis itself."""

Ending = Literal["drain", "unwanted", "lost"]


@dataclass
class _Running:
    """One turn in the engine, or about to be: `task` is there once it has begun."""

    claim: Claim
    progress: Progress = field(default_factory=Progress)
    task: asyncio.Task[None] | None = None
    ending: Ending | None = None

    def end(self, ending: Ending) -> None:
        if self.ending is None:
            self.ending = ending
            # A task that is cancelled before its first step never runs: it would hold its turn for ever.
            if self.task is not None:
                self.task.cancel()


class TurnWorker(Worker):
    """Takes turns of one model from the queue into one engine.

    Made after the engine, with an event loop of its own. `run()` returns when it has drained, or when the
    engine has died; `exit_code` says which.
    """

    def __init__(
        self, engine: Engine, farm: Farm, settings: WorkerSettings | None = None, **options: Any
    ) -> None:
        self.settings = settings or WorkerSettings()
        self.engine, self.farm, self.model = engine, farm, engine.served_name
        self.capacity = engine.capacity()
        self.id = uuid.uuid4().hex[:8]
        self.exit_code = 0
        self._started = time.time()
        self._running: dict[str, _Running] = {}
        self._stopping = False
        self._lease = self.settings.lease
        self._background: set[asyncio.Task[Any]] = set()
        super().__init__(
            functions=[func(answer_turn, name="answer_turn")],  # type: ignore[arg-type]
            ctx={"engine": engine, "worker": self.id},
            redis_pool=ArqRedis(farm.pool(connections=8)),
            queue_name=farm.keys.due(self.model),
            health_check_key=f"{farm.keys.worker(self.id)}:arq",
            max_jobs=self.capacity.slots,
            poll_delay=0.001,
            handle_signals=False,
            **options,
        )
        self._kick = asyncio.Event()
        self._idle = asyncio.Event()
        self._exchanges = Exchanges(
            lambda: self.pool,
            [farm.keys.prefix, farm.keys.queue(self.model)],
            self.id,
            taken=self._begin,
            ended=self._kick.set,
            spawn=self._spawn,
        )
        self._pulse = Pulse(engine, lambda: [r.progress for r in self._running.values()])

    # Life

    async def main(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, self.stop)
        await self._until_redis_answers()
        log.info(
            "worker %s serves %s with %s %s: %d slots, context %d",
            self.id,
            self.model,
            self.engine.identity.engine,
            self.engine.identity.version,
            self.capacity.slots,
            self.capacity.context,
        )
        self._spawn(self._wait_for_wakes())
        self._spawn(self._pulse.watch(self._engine_died))
        keeper = LeaseKeeper(
            self.farm,
            self.model,
            self._lease,
            held=lambda: [(r.claim.hash, r.claim.token) for r in list(self._running.values())],
            info=self.info,
            alive=self._alive,
            renewed=lambda lost, unwanted: _quietly(
                self.loop.call_soon_threadsafe, self._let_go, lost, unwanted
            ),
        )
        keeper.start()
        try:
            await self._main_outliving_redis()
        finally:
            keeper.stop()
            await asyncio.to_thread(keeper.join, 2)
            await end_tasks(self._background)

    async def _main_outliving_redis(self) -> None:
        """arq asks Redis for its version before it begins, which is no reason to end."""
        while True:
            try:
                return await super().main()
            except FAULTS as error:
                if not passes(error):
                    raise
                await asyncio.sleep(BACK_OFF)

    def stop(self) -> None:
        """Drain: claim nothing more, finish what ends in time, hand back the rest. The second call hands
        back at once."""
        if self._stopping:
            self._hand_back()
            return
        self._stopping = True
        self.allow_pick_jobs = False
        log.info("draining %d turns, for at most %g s", len(self._running), self.settings.drain)
        self.loop.call_later(self.settings.drain, self._hand_back)
        self._kick.set()

    async def close(self) -> None:
        if self._pool is None:
            return
        if self.on_shutdown:
            await self.on_shutdown(self.ctx)
        with contextlib.suppress(*FAULTS):
            await self.pool.delete(self.health_check_key)
            await self.pool.aclose(close_connection_pool=True)
        self._pool = None

    def info(self) -> WorkerInfo:
        """What this worker says of itself to the farm."""
        return WorkerInfo(
            id=self.id,
            host=socket.gethostname(),
            pid=os.getpid(),
            model=self.model,
            revision=self.engine.identity.revision,
            engine=self.engine.identity,
            slots=self.capacity.slots,
            context=self.capacity.context,
            running=len(self._running),
            state="draining" if self._stopping else "serving",
            started=self._started,
            heartbeat=time.time(),
        )

    async def _until_redis_answers(self) -> None:
        said = False
        while True:
            if self._stopping:
                raise asyncio.CancelledError
            try:
                await self._exchanges.load_scripts()
                ours = str(int(self.settings.lease * 1000))
                await self.pool.set(self.farm.keys.lease, ours, nx=True)
                self._lease = int(await self.pool.get(self.farm.keys.lease)) / 1000
                break
            except FAULTS as error:
                if not passes(error):
                    raise
                if not said:
                    log.warning("waiting for Redis: %s", error)
                said = True
                await asyncio.sleep(BACK_OFF)
        if self._lease != self.settings.lease:
            log.warning("the farm's lease is %g s; it is used instead of ours", self._lease)

    def _spawn(self, work: Any) -> None:
        """A background task whose death is the worker's: one that dies silently costs hours."""

        def watch(task: asyncio.Task[Any]) -> None:
            self._background.discard(task)
            if not task.cancelled() and task.exception() is not None:
                log.critical("a background task died", exc_info=task.exception())
                self._end(ENGINE_DIED)

        task = self.loop.create_task(work)
        task.add_done_callback(watch)
        self._background.add(task)

    def _end(self, exit_code: int) -> None:
        self.exit_code = self.exit_code or exit_code
        self._stopping = True
        self.allow_pick_jobs = False
        self._hand_back()

    def _hand_back(self) -> None:
        for running in list(self._running.values()):
            running.end("drain")
        self._kick.set()

    # The engine

    def _alive(self) -> bool:
        """Asked by the lease keeper's thread. A stalled engine is a dead one: with its loop perhaps blocked
        for ever there is no polite way out, and the leases must lapse."""
        if self._pulse.age() > self.settings.stalled_after:
            log.critical("the engine has not moved for %.0f s: giving up", self._pulse.age())
            os._exit(ENGINE_DIED)
        return True

    def _engine_died(self, why: str) -> None:
        if self.exit_code != ENGINE_DIED:
            log.critical("the engine died: %s", why)
        self._end(ENGINE_DIED)

    def _let_go(self, lost: Held, unwanted: Held) -> None:
        endings: tuple[tuple[Ending, Held], ...] = (("lost", lost), ("unwanted", unwanted))
        for ending, claims in endings:
            for hash, token in claims:
                running = self._running.get(hash)
                if running is not None and running.claim.token == token:
                    running.end(ending)

    # The queue

    async def _poll_iteration(self) -> None:
        """Called by arq again and again. Stays inside while there is work: arq sleeps between calls."""
        while True:
            self._kick.clear()
            while self._exchanges.start(self._room(), len(self._running)):
                pass
            if self._stopping and not self._running and self._exchanges.done:
                assert self.main_task is not None
                self.main_task.cancel()
                return
            if self._exchanges.idle:
                break
            await self._kick.wait()
        if len(self._running) < self.max_jobs and self.allow_pick_jobs:
            self._idle.set()
        try:
            await asyncio.wait_for(self._kick.wait(), IDLE_SECONDS)
        except TimeoutError:
            self._exchanges.more = True
        finally:
            self._idle.clear()
        with contextlib.suppress(*FAULTS):
            await self.heart_beat()

    def _room(self) -> int:
        """How many turns to claim now: at most half of the slots at a time, so that one half is worked on
        while Redis is asked for the other."""
        if not (self.allow_pick_jobs and self._exchanges.more):
            return 0
        if len(self._exchanges.finished) >= self.settings.unstored:
            return 0
        if any(r.claim.company is not Company.ANY for r in self._running.values()):
            return 0
        if self._exchanges.may_bring_suspects:
            return 0  # they must not get company
        free = self.max_jobs - len(self._running) - self._exchanges.claiming
        return min(free, -(-self.max_jobs // 2))

    async def _begin(self, claims: list[Claim]) -> None:
        """Answer these turns, each in a task of its own."""
        claimed = [_Running(claim) for claim in claims]
        self._running.update((running.claim.hash, running) for running in claimed)
        # What Redis is asked next leaves before these begin, so that it works while they do.
        if claimed and self._exchanges.start(self._room(), len(self._running)):
            await asyncio.sleep(0)
        for running in claimed:
            self.loop.create_task(self._run_turn(running))

    # One turn

    async def _run_turn(self, running: _Running) -> None:
        claim = running.claim
        context = {**self.ctx, "job_id": claim.hash, "job_try": len(claim.earlier) + 1}
        died: str | None = None
        running.task = asyncio.current_task()
        try:
            if running.ending:
                raise asyncio.CancelledError
            if self.on_job_start:
                await self.on_job_start(context)
            job = self.functions["answer_turn"].coroutine
            finish = await job(context, claim, running.progress)
            self.jobs_complete += 1
        except EngineDied as error:
            finish = requeue(claim, "death")
            died = str(error)
        except asyncio.CancelledError:
            finish = self._cancelled(running)
        except Exception:
            log.exception("a hook failed on turn %s; it is tried again", claim.hash[:12])
            finish = requeue(claim, "retry", RETRY_AFTER[-1])
        if self.on_job_end:
            with contextlib.suppress(asyncio.CancelledError):
                await self.on_job_end(context)
        if self._running.get(claim.hash) is running:
            del self._running[claim.hash]
        self._exchanges.finished.append(finish)
        self._exchanges.more = True
        self._kick.set()
        if died is not None:
            self._engine_died(died)

    def _cancelled(self, running: _Running) -> Finish:
        claim = running.claim
        if running.ending == "unwanted":
            return Finish(claim.hash, claim.token, "cancelled")
        if self.exit_code == ENGINE_DIED:
            return requeue(claim, "death")
        return requeue(claim, "drain" if self._stopping else "handback")

    async def _wait_for_wakes(self) -> None:
        """Blocks on the wake list with a connection of its own. A full worker leaves wakes to others:
        it claims again anyway when a turn ends."""
        wake = self.farm.keys.wake(self.model)
        while True:
            await self._idle.wait()
            try:
                if await self.pool.blpop([wake], timeout=5):  # type: ignore[misc]
                    if not self._idle.is_set():
                        await self.pool.lpush(wake, "1")  # type: ignore[misc]
                    self._exchanges.more = True
                    self._kick.set()
            except FAULTS:
                await asyncio.sleep(BACK_OFF)


def _quietly(call: Any, *args: Any) -> None:
    """Call into a loop that may just have been closed."""
    with contextlib.suppress(RuntimeError):
        call(*args)
