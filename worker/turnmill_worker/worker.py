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
from collections.abc import Callable
from functools import partial
from typing import Any

from arq.connections import ArqRedis
from arq.worker import Worker, func

from turnmill.faults import passes
from turnmill.settings import Farm
from turnmill.store import WorkerInfo
from turnmill.tasks import end_tasks
from turnmill_worker.claim import Claim, Finish, requeue
from turnmill_worker.counters import Counters, Vitals
from turnmill_worker.engines.adapters import by_each_name
from turnmill_worker.engines.base import Engine, EngineAway, EngineDied
from turnmill_worker.exchange import BACK_OFF, FAULTS
from turnmill_worker.job import RETRY_AFTER, answer_turn
from turnmill_worker.pulse import Pulse
from turnmill_worker.settings import WorkerSettings
from turnmill_worker.side import Running, Side

log = logging.getLogger("turnmill.worker")

ENGINE_DIED = 70
"""Exit code: start me again."""

IDLE_SECONDS = 0.5
"""How long an idle worker sleeps if nobody wakes it. A wake can be lost only with Redis itself."""

LAST_KEEP_SECONDS = 1.0
"""How long a worker that drains tries to keep what its turns have got."""

GOODBYE_SECONDS = 2.0
"""How long a worker that ends waits for a Redis that does not answer."""


class TurnWorker(Worker):
    """Takes turns from the queue into one engine: of its model, and of each of its adapters (side.py).

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
        self.engine, self.farm = engine, farm
        self.capacity = engine.capacity()
        self.exit_code = 0
        self.crash = ""
        self._crashed = crashed
        self._started = time.time()
        self._kick = asyncio.Event()
        self._idle = asyncio.Event()
        self._sides = [
            Side(
                answering,
                farm,
                lambda: self.pool,
                taken=self._begin,
                ended=self._kick.set,
                spawn=self._spawn,
            )
            for answering in by_each_name(engine)
        ]
        self._apart: Side | None = None  # the one that needs the engine without company now
        self.id = self._sides[0].id
        self._stopping = self._handing_back = self._told_twice = False
        self._lease = self.settings.lease
        self._background: set[asyncio.Task[Any]] = set()
        super().__init__(
            functions=[func(answer_turn, name="answer_turn")],  # type: ignore[arg-type]
            ctx={"engine": engine, "worker": self.id},
            redis_pool=ArqRedis(farm.pool(connections=4 + 4 * len(self._sides))),
            queue_name=farm.keys.due(engine.served_name),
            health_check_key=f"{farm.keys.worker(self.id)}:arq",
            max_jobs=self.capacity.slots,
            poll_delay=0.001,
            handle_signals=False,
            **options,
        )
        self._pulse = Pulse(engine, lambda: [r.progress for r in self._running_now()])

    # Life

    async def main(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, self.stop)
        await self._until_redis_answers()
        for side in self._sides:
            log.info(
                "worker %s serves %s with %s %s: %d slots, context %d",
                side.id,
                side.model,
                self.engine.identity.engine,
                self.engine.identity.version,
                self.capacity.slots,
                self.capacity.context,
            )
        self._spawn(self._wait_for_wakes())
        self._spawn(self._pulse.watch(self._engine_died))
        keepers = []
        for side in self._sides:
            self._spawn(side.keeper.run(self.settings.keep_every))
            self._spawn(side.keeper.tell())
            info = partial(self._info, side)
            keepers.append(side.lease_keeper(self._lease, info=info, alive=self._alive))
        for keeper in keepers:
            keeper.start()
        try:
            await self._main_outliving_redis()
        finally:
            for keeper in keepers:
                keeper.stop()
            await asyncio.gather(*(asyncio.to_thread(keeper.join, 2) for keeper in keepers))
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
        log.info("draining %d turns, for at most %g s", self._count(), self.settings.drain)
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

    def _info(self, side: Side) -> WorkerInfo:
        """What this worker says of itself to those who ask for one of its names. The slots are one worker's, for all of
        them."""
        running = side.running_now()
        return WorkerInfo(
            id=side.id,
            host=socket.gethostname(),
            pid=os.getpid(),
            model=side.model,
            revision=side.engine.identity.revision,
            engine=side.engine.identity,
            slots=self.capacity.slots,
            context=self.capacity.context,
            running=len(running),
            tokens=side.counters.made + sum(r.progress.made for r in running),
            state=self._state(),
            started=self._started,
            heartbeat=time.time(),
        )

    @property
    def counters(self) -> Counters:
        """Of all names together; may be read from any thread."""
        return Counters.together([side.counters for side in self._sides])

    def _state(self) -> str:
        if self._stopping:
            return "draining"
        return "away" if self._pulse.away else "serving"

    def vitals(self) -> Vitals:
        """How this worker is; may be called from any thread."""
        return Vitals(
            infos=[self._info(side) for side in self._sides],
            in_engine=self.engine.running(),
            unstored=sum(side.exchanges.unstored for side in self._sides),
            silent=self._pulse.age(),
            ending=(self.crash or "the engine died") if self.exit_code else "",
        )

    async def _until_redis_answers(self) -> None:
        said = False
        while True:
            if self._stopping:
                raise asyncio.CancelledError
            try:
                exchanges = self._sides[0].exchanges
                await exchanges.load_scripts()
                await exchanges.publish_scripts(self.farm.keys.scripts)
                for side in self._sides:
                    self._lease = await side.register(self._info(side), self.settings.lease)
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
            keeping = asyncio.gather(*(side.keeper.keep() for side in self._sides))
            await asyncio.wait_for(keeping, LAST_KEEP_SECONDS)
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

    def _running_now(self) -> list[Running]:
        return [running for side in self._sides for running in side.running_now()]

    def _count(self) -> int:
        """Turns that it holds."""
        return sum(len(side.running) for side in self._sides)

    def _holds_suspects(self) -> bool:
        return any(side.holds_suspects for side in self._sides)

    # The queue

    async def _poll_iteration(self) -> None:
        """Called by arq again and again. Stays inside while there is work: arq sleeps between calls."""
        while True:
            self._kick.clear()
            while self._exchange():
                pass
            if self._stopping and not self._count() and self._may_leave():
                assert self.main_task is not None
                self.main_task.cancel()
                return
            if all(side.exchanges.idle for side in self._sides):
                break
            await self._kick.wait()
        if self._count() < self.max_jobs and self.allow_pick_jobs and not self._pulse.away:
            self._idle.set()
        try:
            await asyncio.wait_for(self._kick.wait(), IDLE_SECONDS)
        except TimeoutError:
            for side in self._sides:
                side.exchanges.more = True
        finally:
            self._idle.clear()
        with contextlib.suppress(*FAULTS):
            await self.heart_beat()

    def _may_leave(self) -> bool:
        """Not before Redis has every answer; but a Redis that is away is waited for only with answers in hand,
        and only until we are told to end once more."""
        exchanges = [side.exchanges for side in self._sides]
        if all(one.done for one in exchanges):
            return True
        away = any(one.away for one in exchanges) or not self.counters.registered
        answers = sum(one.answers for one in exchanges)
        if away and answers and self._told_twice:
            log.error("Redis is away; answers lost with us: %d", answers)
            return True
        return away and not answers

    def _exchange(self) -> bool:
        """Begin a round trip with Redis; False if there is none to begin. Who has the fewest turns here asks first for
        more, and of those who asked longest ago: so no name keeps another from the slots."""
        held = sum(side.held for side in self._sides)
        order = sorted(self._sides, key=lambda side: (side.held, side.exchanges.asked))
        return any(
            side.exchanges.start(self._room(side, held), held - side.exchanges.claiming)
            for side in order
        )

    def _room(self, side: Side, held: int) -> int:
        """How many turns to claim now for one side: at most half of the slots at a time, so that one half is worked on
        while Redis is asked for the other. `held`: slots that are taken."""
        if not self.allow_pick_jobs or self._pulse.away or not self._may_have_more(side):
            return 0
        free = self.max_jobs - held
        if (
            free <= 0
            or sum(len(s.exchanges.finished) for s in self._sides) >= self.settings.unstored
        ):
            return 0
        if any(s.exchanges.may_bring_suspects for s in self._sides) or not self._may_claim(side):
            return 0  # they must not get company
        return min(free, -(-self.max_jobs // 2))

    @staticmethod
    def _may_have_more(side: Side) -> bool:
        """A worker without room hears no wakes; it asks again for a name whose turns have ended, and now and then for
        those that have none here."""
        exchanges = side.exchanges
        return exchanges.more or time.monotonic() - exchanges.asked > IDLE_SECONDS

    def _may_claim(self, side: Side) -> bool:
        """Whether no other side needs the engine without company. If several do, it is one after the other's turn, or
        all would wait for all."""
        if len(self._sides) == 1:
            return True
        if self._apart is None or not self._apart.needs_no_company:
            needy = (one for one in self._sides if one.needs_no_company)
            self._apart = next(needy, None)
        return self._apart in (None, side)

    async def _begin(self, side: Side, claims: list[Claim]) -> None:
        """Answer these turns, each in a task of its own."""
        claimed = side.take(claims)
        # What Redis is asked next leaves before these begin, so that it works while they do.
        if claimed and self._exchange():
            await asyncio.sleep(0)
        for running in claimed:
            if running.claim.stream:
                side.keeper.stream(running)
            if self._handing_back:  # they were on their way when the others went back
                running.end("drain")
            self.loop.create_task(self._run_turn(side, running))

    # One turn

    async def _run_turn(self, side: Side, running: Running) -> None:
        claim = running.claim
        context = {
            **self.ctx,
            "engine": side.engine,
            "worker": side.id,
            "job_id": claim.hash,
            "job_try": len(claim.earlier) + 1,
        }
        died: str | None = None
        running.task = asyncio.current_task()
        try:
            if running.ending:
                raise asyncio.CancelledError
            if self.on_job_start:
                await self.on_job_start(context)
            if claim.log:
                running.progress.kept = await side.keeper.read(claim.hash)
                if running.teller is not None:
                    running.teller.earlier = await side.keeper.read_told(claim.hash)
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
        side.hand_in(running, finish)
        self._kick.set()

    def _cancelled(self, running: Running) -> Finish:
        claim = running.claim
        if running.ending == "unwanted":
            return Finish(claim.hash, claim.token, "cancelled")
        if self.exit_code == ENGINE_DIED and running.progress.sent:  # it was in the engine
            return requeue(claim, "death")
        return requeue(claim, "drain" if self._stopping else "handback")

    async def _wait_for_wakes(self) -> None:
        """Blocks on the wake lists with a connection of its own. A full worker leaves wakes to others:
        it claims again anyway when a turn ends."""
        keys = self.farm.keys
        while True:
            await self._idle.wait()
            asking = filter(self._may_claim, self._sides)
            sides = {keys.wake(side.model).encode(): side for side in asking}
            try:
                if woken := await self.pool.blpop(list(sides), timeout=5):  # type: ignore[misc]
                    wake, _ = woken
                    if not self._idle.is_set():
                        await self.pool.lpush(wake, "1")  # type: ignore[misc]
                    sides[wake].exchanges.more = True
                    self._kick.set()
            except FAULTS:
                await asyncio.sleep(BACK_OFF)
