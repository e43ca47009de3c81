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
from redis.exceptions import NoScriptError, RedisError

from turnmill.faults import passes, refuses
from turnmill.settings import Farm
from turnmill.store import WorkerInfo
from turnmill.tasks import end_tasks
from turnmill_worker import scripts
from turnmill_worker.claim import Claim, Company, Finish, read_claims, requeue
from turnmill_worker.engines.base import Engine, EngineDied, Progress
from turnmill_worker.job import RETRY_AFTER, answer_turn
from turnmill_worker.lease import Held, LeaseKeeper
from turnmill_worker.pulse import Pulse
from turnmill_worker.scripts import CLAIM, FINISH, RECOVER
from turnmill_worker.settings import WorkerSettings

log = logging.getLogger("turnmill.worker")

ENGINE_DIED = 70
"""Exit code: start me again."""

EXCHANGES = 2
"""Round trips under way at once: Redis and this process work at the same time."""
CLAIM_TURNS = 1000
CLAIM_BYTES = 4 << 20
FINISH_TURNS = 200
FINISH_BYTES = 4 << 20
IDLE_SECONDS = 0.5
"""How long an idle worker sleeps if nobody wakes it. A wake can be lost only with Redis itself."""
BACK_OFF = 0.05
"""Seconds between tries while Redis is away. Under a storm of killed connections this decides how fast
the farm heals."""
REFUSED_BACK_OFF = 5.0
"""Seconds, where only a person can mend it: a changed password, a rule."""

FAULTS = (RedisError, OSError, asyncio.TimeoutError)

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


@dataclass(eq=False)
class _Exchange:
    """One round trip with Redis, under way: what it hands in, what it clears up (tokens of CLAIMs that were
    not answered), and what it claims: `room` turns under `token`, by a worker that held `holding`."""

    finished: list[Finish]
    unanswered: list[str]
    room: int
    token: str = ""
    holding: int = 0


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
        self._claims = 0
        self._running: dict[str, _Running] = {}
        self._finished: list[Finish] = []
        self._unanswered: list[str] = []
        self._exchanges: set[_Exchange] = set()
        self._more = True
        self._stopping = False
        self._lease = self.settings.lease
        self._background: set[asyncio.Task[Any]] = set()
        self._prefixes = [farm.keys.prefix, farm.keys.queue(self.model)]
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
                await self._load_scripts()
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

    async def _load_scripts(self) -> None:
        for script in scripts.ALL:
            await self.pool.script_load(script.text)

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
            while self._start_exchange():
                pass
            if self._stopping and not (self._running or self._finished or self._exchanges):
                assert self.main_task is not None
                self.main_task.cancel()
                return
            if not self._exchanges:
                break
            await self._kick.wait()
        if len(self._running) < self.max_jobs and self.allow_pick_jobs:
            self._idle.set()
        try:
            await asyncio.wait_for(self._kick.wait(), IDLE_SECONDS)
        except TimeoutError:
            self._more = True
        finally:
            self._idle.clear()
        with contextlib.suppress(*FAULTS):
            await self.heart_beat()

    def _start_exchange(self) -> bool:
        """Send what there is to say to Redis, if there is anything and a lane is free."""
        room = self._room()
        if len(self._exchanges) >= EXCHANGES or not (room or self._finished or self._unanswered):
            return False
        exchange = _Exchange(self._finished, self._unanswered, room)
        self._finished, self._unanswered = [], []
        if room:
            self._claims += 1
            exchange.token = f"{self.id}{self._claims:016x}"
            exchange.holding = len(self._running) + sum(e.room for e in self._exchanges)
            # Before CLAIM leaves: a wake that comes during the call must count for the next one.
            self._more = False
        self._exchanges.add(exchange)
        self._spawn(self._exchange(exchange))
        return True

    def _room(self) -> int:
        """How many turns to claim now: at most half of the slots at a time, so that one half is worked on
        while Redis is asked for the other."""
        if not (self.allow_pick_jobs and self._more):
            return 0
        if len(self._finished) >= self.settings.unstored:
            return 0
        if any(r.claim.company is not Company.ANY for r in self._running.values()):
            return 0
        if any(e.token and not e.holding for e in self._exchanges):
            return 0  # it may bring a suspect, which must not get company
        claiming = sum(e.room for e in self._exchanges)
        return min(
            self.max_jobs - len(self._running) - claiming, -(-self.max_jobs // 2), CLAIM_TURNS
        )

    async def _exchange(self, exchange: _Exchange) -> None:
        try:
            await self._round_trip(exchange)
        except BaseException:
            # Storing twice is harmless, and so is clearing up what was never claimed.
            self._finished = exchange.finished + self._finished
            self._unanswered += [*exchange.unanswered, *filter(None, [exchange.token])]
            raise
        finally:
            self._exchanges.discard(exchange)
            self._kick.set()

    async def _round_trip(self, exchange: _Exchange) -> None:
        """Hand in what has finished, take what there is room for. If Redis does not take part, nothing was
        lost here, and what is unsure is cleared up next time."""
        groups = _groups(exchange.finished)
        pipe = self.pool.pipeline(transaction=False)
        for unanswered in exchange.unanswered:
            pipe.evalsha(RECOVER.sha, 2, *self._prefixes, unanswered)
        for group in groups:
            pipe.evalsha(FINISH.sha, 2, *self._prefixes, *_flat(group))
        if exchange.token:
            wanted = [exchange.token, str(exchange.room), str(exchange.holding), str(CLAIM_BYTES)]
            pipe.evalsha(CLAIM.sha, 2, *self._prefixes, *wanted)
        commands = len(pipe)
        try:
            answers = await pipe.execute(raise_on_error=False)
        except FAULTS as error:
            answers = [error] * commands
        recovered = answers[: len(exchange.unanswered)]
        stored = answers[len(exchange.unanswered) : len(exchange.unanswered) + len(groups)]
        self._unanswered += [
            token
            for token, answer in zip(exchange.unanswered, recovered, strict=True)
            if isinstance(answer, Exception)
        ]
        for group, answer in zip(groups, stored, strict=True):
            await self._handed_in(group, answer)
        if exchange.token:
            await self._claimed(exchange, answers[-1])
        problems = [answer for answer in answers if isinstance(answer, Exception)]
        if problems:
            await self._recover_from(problems[0])

    async def _handed_in(self, group: list[Finish], answer: Any) -> None:
        if isinstance(answer, Exception):
            if passes(answer) or refuses(answer):
                self._finished = group + self._finished
            elif len(group) > 1:
                # One of them is refused for itself: hand them in one by one.
                for item in group:
                    await self._hand_in_alone(item)
            else:
                log.error("turn %s cannot be stored: %s", group[0].hash[:12], answer)
            return
        for item, result in zip(group, answer, strict=True):
            if result == -1:
                log.error("turn %s: %s was refused by its own error", item.hash[:12], item.verb)

    async def _hand_in_alone(self, item: Finish) -> None:
        try:
            await self.pool.evalsha(FINISH.sha, 2, *self._prefixes, *_flat([item]))  # type: ignore[misc]
        except FAULTS as error:
            if passes(error) or refuses(error):
                self._finished.append(item)
            else:
                log.error("turn %s cannot be stored: %s", item.hash[:12], error)

    async def _claimed(self, exchange: _Exchange, answer: Any) -> None:
        token = exchange.token
        if isinstance(answer, Exception):
            self._more = True
            if not isinstance(answer, NoScriptError):
                self._unanswered.append(token)  # it may have been done all the same
            return
        more, drain = answer[0], answer[1]
        claims = read_claims(token, answer)
        # `drain`: take nothing more until empty (suspects, in claim.lua); each turn that ends asks again.
        self._more = bool(more) and not drain
        claimed = [_Running(claim) for claim in claims]
        self._running.update((running.claim.hash, running) for running in claimed)
        exchange.token, exchange.room = "", 0
        # What Redis is asked next leaves before these begin, so that it works while they do.
        if claimed and self._start_exchange():
            await asyncio.sleep(0)
        for running in claimed:
            self.loop.create_task(self._run_turn(running))

    async def _recover_from(self, problem: Exception) -> None:
        self._more = True
        if isinstance(problem, NoScriptError):
            with contextlib.suppress(*FAULTS):
                await self._load_scripts()
        elif not passes(problem):
            log.error("Redis refuses: %s", problem)
            await asyncio.sleep(REFUSED_BACK_OFF)
        await asyncio.sleep(BACK_OFF)

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
        self._finished.append(finish)
        self._more = True
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
                    self._more = True
                    self._kick.set()
            except FAULTS:
                await asyncio.sleep(BACK_OFF)


def _groups(finished: list[Finish]) -> list[list[Finish]]:
    """What one FINISH takes: a bounded number of turns and of bytes, at least one."""
    groups: list[list[Finish]] = []
    size = FINISH_BYTES + 1
    for item in finished:
        if size + item.size > FINISH_BYTES or len(groups[-1]) >= FINISH_TURNS:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += item.size
    return groups


def _flat(group: list[Finish]) -> list[Any]:
    return [part for item in group for part in item]


def _quietly(call: Any, *args: Any) -> None:
    """Call into a loop that may just have been closed."""
    with contextlib.suppress(RuntimeError):
        call(*args)
