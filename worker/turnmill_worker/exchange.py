"""Round trips with Redis: a worker hands in how turns ended and takes new ones, many at a time.

Two are under way at once, so that Redis works on one while this process works on what the other brought. If
an answer is lost, nothing is: storing twice is harmless, and what a lost CLAIM may have taken is handed back
before the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, OutOfMemoryError, RedisError

from turnmill.faults import passes, refuses
from turnmill.scripts import CANCEL, ENQUEUE
from turnmill_worker import scripts
from turnmill_worker.claim import Claim, Finish, read_claims
from turnmill_worker.scripts import CLAIM, FINISH, RECOVER

log = logging.getLogger("turnmill.worker")

AT_ONCE = 2
"""Round trips under way at once."""
CLAIM_TURNS = 1000
CLAIM_BYTES = 4 << 20
FINISH_TURNS = 200
FINISH_BYTES = 4 << 20
BACK_OFF = 0.05
"""Seconds between tries while Redis is away. Under a storm of killed connections this decides how fast
the farm heals."""
REFUSED_BACK_OFF = 5.0
"""Seconds, where only a person can mend it: a changed password, a rule."""

FAULTS = (RedisError, OSError, asyncio.TimeoutError)


@dataclass(eq=False)
class _Exchange:
    """One round trip, under way: what it hands in, what it clears up (tokens of CLAIMs that were not
    answered), and what it claims: `room` turns under `token`, by a worker that held `holding`."""

    finished: list[Finish]
    unanswered: list[str]
    room: int
    token: str = ""
    holding: int = 0


class Exchanges:
    """A worker's side of one model's queue.

    `taken` is given the turns of each CLAIM, `jobs` the jobs of arq's clients; `ended` is called after each round trip; `spawn` runs a
    coroutine whose death is the worker's.

    `finished`: how turns ended, not yet handed in. `more`: whether asking for turns may bring any.
    `away`: whether Redis did not take part in the last round trip. `drained`: whether Redis keeps this worker for suspects:
    the last CLAIM brought some, or none before the worker is empty. `asked`: when a CLAIM left last (`time.monotonic`).
    """

    def __init__(
        self,
        pool: Callable[[], Redis],
        prefixes: list[str],
        worker: str,
        *,
        taken: Callable[[list[Claim]], Awaitable[None]],
        jobs: Callable[[list[str]], Coroutine[Any, Any, None]],
        ended: Callable[[], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._pool, self._prefixes, self._worker = pool, prefixes, worker
        self._tend = jobs
        self._taken, self._ended, self._spawn = taken, ended, spawn
        self.finished: list[Finish] = []
        self.more = True
        self.away = self.drained = False
        self.asked = -math.inf
        self._unanswered: list[str] = []
        self._under_way: set[_Exchange] = set()
        self._claims = 0

    @property
    def idle(self) -> bool:
        """Nothing is under way."""
        return not self._under_way

    @property
    def done(self) -> bool:
        """Redis knows how every turn ended, and nothing more is to be said."""
        return not (self._under_way or self.finished)

    @property
    def unstored(self) -> int:
        """Turns of which Redis may not know yet how they ended."""
        return len(self._unsaid)

    @property
    def answers(self) -> int:
        """Those of them that cost an engine's time: a turn that goes back comes back by itself."""
        return sum(item.verb in ("ok", "fail") for item in self._unsaid)

    @property
    def _unsaid(self) -> list[Finish]:
        return [*self.finished, *(item for e in self._under_way for item in e.finished)]

    @property
    def claiming(self) -> int:
        """Turns that may yet come of what is under way."""
        return sum(exchange.room for exchange in self._under_way)

    @property
    def may_bring_suspects(self) -> bool:
        """Whether a CLAIM of an empty worker is under way."""
        return any(exchange.token and not exchange.holding for exchange in self._under_way)

    @property
    def _recovering(self) -> bool:
        """Whether a CLAIM that was not answered is still to be cleared up."""
        return bool(self._unanswered) or any(e.unanswered for e in self._under_way)

    def start(self, room: int, held: int) -> bool:
        """Say to Redis what there is to say, and claim `room` turns for a worker that holds `held`; False if
        there is nothing to say, or both lanes are taken."""
        if self._recovering:
            room = 0  # or each CLAIM that is lost while Redis is away leaves one more to clear up
        if len(self._under_way) >= AT_ONCE or not (room or self.finished or self._unanswered):
            return False
        exchange = _Exchange(self.finished, self._unanswered, min(room, CLAIM_TURNS))
        self.finished, self._unanswered = [], []
        if room:
            self._claims += 1
            exchange.token = f"{self._worker}{self._claims:016x}"
            exchange.holding = held + self.claiming
            # Before CLAIM leaves: a wake that comes during the call must count for the next one.
            self.more = False
            self.asked = time.monotonic()
        self._under_way.add(exchange)
        self._spawn(self._run(exchange))
        return True

    async def load_scripts(self) -> None:
        pipe = self._pool().pipeline(transaction=False)
        for script in scripts.ALL:
            pipe.script_load(script.text)
        for answer in await pipe.execute(raise_on_error=False):
            if isinstance(answer, Exception):
                raise answer  # as Redis put it: `passes` goes by its first word

    async def publish_scripts(self, key: str) -> None:
        """Leave the text of the scripts that producers call, for those in other languages."""
        texts = {script.name: script.text for script in (ENQUEUE, CANCEL)}
        with contextlib.suppress(OutOfMemoryError):
            await self._pool().hset(key, mapping=texts)  # type: ignore[misc]

    async def _run(self, exchange: _Exchange) -> None:
        try:
            await self._round_trip(exchange)
        except BaseException:
            # Storing twice is harmless, and so is clearing up what was never claimed.
            self.finished = exchange.finished + self.finished
            self._unanswered += [*exchange.unanswered, *filter(None, [exchange.token])]
            raise
        finally:
            self._under_way.discard(exchange)
            self._ended()

    async def _round_trip(self, exchange: _Exchange) -> None:
        groups = _groups(exchange.finished)
        pipe = self._pool().pipeline(transaction=False)
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
            self.away = False
        except FAULTS as error:
            answers = [error] * commands
            self.away = True
        recovered = answers[: len(exchange.unanswered)]
        stored = answers[len(exchange.unanswered) : len(exchange.unanswered) + len(groups)]
        self._unanswered += [
            token
            for token, answer in zip(exchange.unanswered, recovered, strict=True)
            if isinstance(answer, Exception)
        ]
        exchange.finished, exchange.unanswered = [], []
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
                self.finished = group + self.finished
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
            await self._pool().evalsha(FINISH.sha, 2, *self._prefixes, *_flat([item]))  # type: ignore[misc]
        except FAULTS as error:
            if passes(error) or refuses(error):
                self.finished.append(item)
            else:
                log.error("turn %s cannot be stored: %s", item.hash[:12], error)

    async def _claimed(self, exchange: _Exchange, answer: Any) -> None:
        token = exchange.token
        if isinstance(answer, Exception):
            self.more = True
            if not isinstance(answer, NoScriptError):
                self._unanswered.append(token)  # it may have been done all the same
            return
        more, drain, jobs = answer[:3]
        # `drain`: nothing for now (suspects, in claim.lua); each turn that ends asks again, and idleness.
        self.more, self.drained = bool(more) and not drain, bool(drain)
        claims = read_claims(token, answer)
        if jobs:
            self._spawn(self._tend([job.decode(errors="replace") for job in jobs]))
        exchange.token, exchange.room = "", 0
        await self._taken(claims)

    async def _recover_from(self, problem: Exception) -> None:
        self.more = True
        if isinstance(problem, NoScriptError):
            with contextlib.suppress(*FAULTS):
                await self.load_scripts()
                return  # at once: they may be forgotten again
        elif not passes(problem):
            log.error("Redis refuses: %s", problem)
            await asyncio.sleep(REFUSED_BACK_OFF)
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
