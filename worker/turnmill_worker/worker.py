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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from arq.connections import ArqRedis
from arq.worker import Worker, func

from turnmill.faults import passes
from turnmill.scripts import call
from turnmill.settings import Farm
from turnmill.store import WorkerInfo
from turnmill.tasks import end_tasks
from turnmill_worker.arq_door import ArqDoor
from turnmill_worker.claim import Claim, Company, Finish, requeue
from turnmill_worker.counters import Counters, Vitals
from turnmill_worker.engines.base import Engine, EngineAway, EngineDied, Progress
from turnmill_worker.exchange import BACK_OFF, FAULTS, Exchanges
from turnmill_worker.job import RETRY_AFTER, answer_turn
from turnmill_worker.lease import Held, LeaseKeeper
from turnmill_worker.progress import Keeper
from turnmill_worker.pulse import Pulse
from turnmill_worker.scripts import REGISTER
from turnmill_worker.settings import WorkerSettings
from turnmill_worker.telling import Teller

log = logging.getLogger("turnmill.worker")

ENGINE_DIED = 70
"""Exit code: start me again."""

IDLE_SECONDS = 0.5
"""How long an idle worker sleeps if nobody wakes it. A wake can be lost only with Redis itself."""

EXPIRY_MS = 10_000
"""How long what a worker first says of itself holds; the lease keeper soon says more."""

LAST_KEEP_SECONDS = 1.0
"""How long a worker that drains tries to keep what its turns have got."""

GOODBYE_SECONDS = 2.0
"""How long a worker that ends waits for a Redis that does not answer."""

Ending = Literal["drain", "unwanted", "lost"]


@dataclass
class _Running:
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


class TurnWorker(Worker):
    """Takes turns of one model from the queue into one engine.

    Made after the engine, with an event loop of its own. `run()` returns when it has drained, or when the
    engine has died; `exit_code` says which, and `crash` why, unless suspects may be to blame. A worker whose
    loop stands still cannot return: it tells `crashed` instead, from another thread, before it ends the process.
    """

    def __init__(
        self,
        engine: Engine,
        farm: Farm,
        settings: WorkerSettings | None = None,
        *,
        crashed: Callable[[str], None] = lambda why: None,
        **options: Any,
    ) -> None:
        self.settings = settings or WorkerSettings()
        self.engine, self.farm, self.model = engine, farm, engine.served_name
        self.capacity = engine.capacity()
        self.id = uuid.uuid4().hex[:8]
        self.exit_code = 0
        self.counters = Counters()
        self.crash = ""
        self._crashed = crashed
        self._started = time.time()
        self._running: dict[str, _Running] = {}
        self._stopping = self._handing_back = self._told_twice = False
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
            jobs=lambda jobs: ArqDoor(self.pool, farm.keys, self.model).tend(jobs),
            ended=self._kick.set,
            spawn=self._spawn,
        )
        self._keeper = Keeper(
            lambda: self.pool, farm.keys, self.model, engine.identity, self._running_now
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
        self._spawn(self._keeper.run(self.settings.keep_every))
        self._spawn(self._keeper.tell())
        leases = LeaseKeeper(
            self.farm,
            self.model,
            self._lease,
            held=lambda: [(r.claim.hash, r.claim.token) for r in self._running_now()],
            info=self.info,
            alive=self._alive,
            renewed=lambda lost, unwanted: _quietly(
                self.loop.call_soon_threadsafe, self._let_go, lost, unwanted
            ),
            streamed=lambda hashes: _quietly(self.loop.call_soon_threadsafe, self._stream, hashes),
            counters=self.counters,
        )
        leases.start()
        try:
            await self._main_outliving_redis()
        finally:
            leases.stop()
            await asyncio.to_thread(leases.join, 2)
            await end_tasks(self._background)

    async def _main_outliving_redis(self) -> None:
        """arq asks Redis for its version before it begins, which is no reason to end."""
        while True:
            try:
                return await super().main()
            except FAULTS as error:
                if not passes(error):
                    raise
                if self._stopping:
                    raise asyncio.CancelledError from None
                await asyncio.sleep(BACK_OFF)

    def stop(self) -> None:
        """Drain: claim nothing more, finish what ends in time, hand back the rest. The second call hands
        back at once."""
        if self._stopping:
            self._told_twice = True
            self._hand_back()
            return
        self._stopping = True
        self.allow_pick_jobs = False
        log.info("draining %d turns, for at most %g s", len(self._running), self.settings.drain)
        self.loop.call_later(self.settings.drain, lambda: self._spawn(self._keep_and_hand_back()))
        self._kick.set()

    async def close(self) -> None:
        if self._pool is None:
            return
        if self.on_shutdown:
            await self.on_shutdown(self.ctx)
        with contextlib.suppress(*FAULTS):
            await asyncio.wait_for(self.pool.delete(self.health_check_key), GOODBYE_SECONDS)
        with contextlib.suppress(*FAULTS):
            await asyncio.wait_for(self.pool.aclose(close_connection_pool=True), GOODBYE_SECONDS)
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
            tokens=self.counters.made + sum(r.progress.made for r in self._running_now()),
            state=self._state(),
            started=self._started,
            heartbeat=time.time(),
        )

    def _state(self) -> str:
        if self._stopping:
            return "draining"
        return "away" if self._pulse.away else "serving"

    def vitals(self) -> Vitals:
        """How this worker is; may be called from any thread."""
        return Vitals(
            info=self.info(),
            in_engine=self.engine.running(),
            unstored=self._exchanges.unstored,
            silent=self._pulse.age(),
            ending=(self.crash or "the engine died") if self.exit_code else "",
        )

    async def _until_redis_answers(self) -> None:
        said = False
        while True:
            if self._stopping:
                raise asyncio.CancelledError
            try:
                await self._exchanges.load_scripts()
                await self._exchanges.publish_scripts(self.farm.keys.scripts)
                self._lease = await self._register()
                self.counters.registered = True
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

    async def _register(self) -> float:
        """The farm's lease, in seconds: ours, if it has none yet."""
        info, keys = self.info(), self.farm.keys
        prefixes = [keys.prefix, keys.queue(self.model)]
        args = [int(self.settings.lease * 1000), info.id, info.model_dump_json(), EXPIRY_MS]
        return int(await call(self.pool, REGISTER, prefixes, args)) / 1000

    def _spawn(self, work: Any) -> None:
        """A background task whose death is the worker's: one that dies silently costs hours."""

        def watch(task: asyncio.Task[Any]) -> None:
            self._background.discard(task)
            if not task.cancelled() and task.exception() is not None:
                log.critical("a background task died", exc_info=task.exception())
                self._end(f"a background task died: {task.exception()!r}")

        task = self.loop.create_task(work)
        task.add_done_callback(watch)
        self._background.add(task)

    def _end(self, why: str) -> None:
        if not self.exit_code:
            self.exit_code = ENGINE_DIED
            self.crash = "" if self._holds_suspects() else why
        self._stopping = True
        self.allow_pick_jobs = False
        self._hand_back()

    async def _keep_and_hand_back(self) -> None:
        """So that others go on where these turns are now."""
        with contextlib.suppress(*FAULTS):
            await asyncio.wait_for(self._keeper.keep(), LAST_KEEP_SECONDS)
        self._hand_back()

    def _hand_back(self) -> None:
        self._handing_back = True
        for running in self._running_now():
            running.end("drain")
        self._kick.set()

    # The engine

    def _alive(self) -> bool:
        """Asked by the lease keeper's thread. A stalled engine is a dead one: with its loop perhaps blocked
        for ever there is no polite way out, and the leases must lapse."""
        if self._pulse.age() > self.settings.stalled_after:
            why = f"the engine has not moved for {self._pulse.age():.0f} s"
            log.critical("%s: giving up", why)
            if not self._holds_suspects():
                self._crashed(why)
            os._exit(ENGINE_DIED)
        return True

    def _engine_died(self, why: str) -> None:
        if self.exit_code != ENGINE_DIED:
            log.critical("the engine died: %s", why)
        self._end(f"the engine died: {why}")

    def _running_now(self) -> list[_Running]:
        return list(self._running.values())

    def _holds_suspects(self) -> bool:
        return any(r.claim.company is not Company.ANY for r in self._running_now())

    def _let_go(self, lost: Held, unwanted: Held) -> None:
        endings: tuple[tuple[Ending, Held], ...] = (("lost", lost), ("unwanted", unwanted))
        for ending, claims in endings:
            for hash, token in claims:
                running = self._running.get(hash)
                if running is not None and running.claim.token == token:
                    self.counters.lost += ending == "lost" and running.ending is None
                    running.end(ending)

    def _stream(self, hashes: list[str]) -> None:
        for hash in hashes:
            if (running := self._running.get(hash)) is not None:
                self._keeper.stream(running)

    # The queue

    async def _poll_iteration(self) -> None:
        """Called by arq again and again. Stays inside while there is work: arq sleeps between calls."""
        while True:
            self._kick.clear()
            while self._exchanges.start(self._room(), len(self._running)):
                pass
            if self._stopping and not self._running and self._may_leave():
                assert self.main_task is not None
                self.main_task.cancel()
                return
            if self._exchanges.idle:
                break
            await self._kick.wait()
        if len(self._running) < self.max_jobs and self.allow_pick_jobs and not self._pulse.away:
            self._idle.set()
        try:
            await asyncio.wait_for(self._kick.wait(), IDLE_SECONDS)
        except TimeoutError:
            self._exchanges.more = True
        finally:
            self._idle.clear()
        with contextlib.suppress(*FAULTS):
            await self.heart_beat()

    def _may_leave(self) -> bool:
        """Not before Redis has every answer; but a Redis that is away is waited for only with answers in hand,
        and only until we are told to end once more."""
        if self._exchanges.done:
            return True
        away = self._exchanges.away or not self.counters.registered
        answers = self._exchanges.answers
        if away and answers and self._told_twice:
            log.error("Redis is away; answers lost with us: %d", answers)
            return True
        return away and not answers

    def _room(self) -> int:
        """How many turns to claim now: at most half of the slots at a time, so that one half is worked on
        while Redis is asked for the other."""
        if not (self.allow_pick_jobs and self._exchanges.more) or self._pulse.away:
            return 0
        if len(self._exchanges.finished) >= self.settings.unstored:
            return 0
        if self._exchanges.may_bring_suspects:
            return 0  # they must not get company
        free = self.max_jobs - len(self._running) - self._exchanges.claiming
        return min(free, -(-self.max_jobs // 2))

    async def _begin(self, claims: list[Claim]) -> None:
        """Answer these turns, each in a task of its own."""
        claimed = [_Running(claim, Progress(priority=claim.priority)) for claim in claims]
        self.counters.claimed += len(claimed)
        for running in claimed:
            before = self._running.get(running.claim.hash)
            if before is not None:  # its lease had lapsed, and it has come back to us
                before.end("lost")
        self._running.update((running.claim.hash, running) for running in claimed)
        # What Redis is asked next leaves before these begin, so that it works while they do.
        if claimed and self._exchanges.start(self._room(), len(self._running)):
            await asyncio.sleep(0)
        for running in claimed:
            if running.claim.stream:
                self._keeper.stream(running)
            if self._handing_back:  # they were on their way when the others went back
                running.end("drain")
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
            if claim.log:
                running.progress.kept = await self._keeper.read(claim.hash)
                if running.teller is not None:
                    running.teller.earlier = await self._keeper.read_told(claim.hash)
                if running.ending:  # redis-py can swallow a cancellation
                    raise asyncio.CancelledError
            job = self.functions["answer_turn"].coroutine
            finish = await job(context, claim, running.progress)
            self.jobs_complete += 1
        except EngineDied as error:
            finish = requeue(claim, "death")
            died = str(error)
        except EngineAway as error:
            # Turns that were in it are struck: one of them may be what takes it down, again and again.
            finish = requeue(claim, "death" if error.held else "handback")
            self._pulse.away = str(error)
        except asyncio.CancelledError:
            finish = self._cancelled(running)
        except Exception:
            log.exception("a hook failed on turn %s; it is tried again", claim.hash[:12])
            finish = requeue(claim, "retry", RETRY_AFTER[-1])
        if self.on_job_end:
            with contextlib.suppress(asyncio.CancelledError):
                await self.on_job_end(context)
        if died is not None:  # while it is still known which turns were in the engine
            self._engine_died(died)
        if self._running.get(claim.hash) is running:
            del self._running[claim.hash]
        self.counters.count(finish, running.progress.reply)
        self.counters.made += running.progress.made
        # It may lead back to the progress: a circle, which only the garbage collector would free.
        running.progress.growing = None
        self._keeper.end(running)
        self._exchanges.finished.append(finish)
        self._exchanges.more = True
        self._kick.set()

    def _cancelled(self, running: _Running) -> Finish:
        claim = running.claim
        if running.ending == "unwanted":
            return Finish(claim.hash, claim.token, "cancelled")
        if self.exit_code == ENGINE_DIED and running.progress.sent:  # it was in the engine
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
