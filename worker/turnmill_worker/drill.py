"""A crash drill: workers on a throwaway namespace, killed at random while they answer turns; then the count."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from redis.asyncio import Redis

from turnmill.children import parent_death_signal
from turnmill.client import Client
from turnmill.errors import UsageError
from turnmill.reply import Reply
from turnmill.settings import Farm
from turnmill.tasks import end_tasks
from turnmill.turn import Message, Sampling, Turn
from turnmill_worker.audit import answers_history, audit

log = logging.getLogger("turnmill.drill")

RUN = "drill"
CONFIGURATION = 2
LOOK_SECONDS = 0.1
SCRIPTED = ("--answer", "history-hash", "--latency", "0.05", "--tokens-per-second", "100")


@dataclass(frozen=True)
class DrillSettings:
    """`turns` of about `tokens` tokens each, `workers` with `slots` each, of which `kills` are killed, one after the other,
    at random moments at least `pause` seconds apart. `lease`, `keep_every`: the workers', in seconds.
    `seed`: of the choice whom to kill, and when. `worker`: what is added to a worker's command line."""

    turns: int = 300
    tokens: int = 200
    workers: int = 3
    slots: int = 16
    kills: int = 6
    pause: float = 1.5
    lease: float = 2.0
    keep_every: float = 1.0
    seed: int = 0
    engine: str = "sim"
    worker: Sequence[str] = ()
    engine_arguments: Sequence[str] = ()

    @property
    def scripted(self) -> bool:
        return self.engine == "sim"

    def command(self) -> list[str]:
        line = [sys.executable, "-m", "turnmill_worker", "--engine", self.engine]
        line += ["--slots", str(self.slots), "--lease", str(self.lease)]
        line += ["--keep-every", str(self.keep_every), *self.worker, "--"]
        if self.scripted:
            line += SCRIPTED
        return [*line, *self.engine_arguments]


@dataclass(frozen=True)
class DrillReport:
    """In turns, but for `kills`; `tokens_made_again`: tokens that were made and had to be made again, as far as the killed
    workers had told of them; `seconds_to_recover`: from a kill until every turn of that worker was in another's hands
    or had ended, the longest; `seconds`: of the whole drill."""

    turns: int
    kills: int
    lost: int
    stored_twice: int
    wrong: int
    held: int
    re_run: int
    tokens: int
    tokens_made_again: int
    seconds_to_recover: float
    seconds: float

    @property
    def passed(self) -> bool:
        return not (self.lost or self.stored_twice or self.wrong or self.held)


@dataclass
class _Worker:
    """One of the workers. `id` is its name in the farm, once it has registered."""

    process: subprocess.Popen[bytes]
    id: str = ""


@dataclass
class _Seen:
    """What is seen of the farm while the drill goes on."""

    tokens: dict[str, int] = field(default_factory=dict)
    recoveries: list[float] = field(default_factory=list)


class Drill:
    """One drill. `farm`: its namespace is used up, and emptied at the end."""

    def __init__(self, settings: DrillSettings, farm: Farm, log_file: Path) -> None:
        self.settings, self._farm, self._log_file = settings, farm, log_file
        self._random = random.Random(settings.seed)
        self._workers: list[_Worker] = []
        self._seen = _Seen()
        self._recovering: set[asyncio.Task[None]] = set()
        self.kills = 0

    async def run(self) -> DrillReport:
        """Raises UsageError if a worker cannot be started, and what a Client raises."""
        began = time.monotonic()
        async with self._namespace() as redis, self._client() as client:
            watcher = asyncio.create_task(self._watch(client))
            answers: asyncio.Task[None] | None = None
            try:
                self._workers = [self._start() for _ in range(self.settings.workers)]
                model = await self._first_model(client)
                turns = [self._turn(model, number) for number in range(self.settings.turns)]
                answers = asyncio.create_task(self._answers(client, turns))
                await self._kill_at_random(client, answers)
                await answers
                await asyncio.gather(*self._recovering)
                await self._all_told(client)
                return await self._report(client, redis, turns, time.monotonic() - began)
            finally:
                await end_tasks([watcher, answers, *self._recovering])
                for worker in self._workers:
                    worker.process.kill()
                    worker.process.wait()

    def _turn(self, model: str, number: int) -> Turn:
        text = f"Drill {number}. Count the sacks, one by one."
        # Answers of one length would end together, and kills would always find turns as old as each other.
        length = round(self.settings.tokens * self._random.uniform(0.5, 1.5))
        sampling = Sampling(temperature=0, max_tokens=max(1, length), ignore_eos=True)
        return Turn(model=model, messages=[Message(role="user", content=text)], sampling=sampling)

    def _right(self, turn: Turn, reply: Reply) -> bool:
        """Whether a reply may be this turn's: of any engine its length is known, of the scripted one its text."""
        whole = reply.usage.completion_tokens == turn.sampling.max_tokens
        return whole and (not self.settings.scripted or answers_history(turn, reply))

    async def _answers(self, client: Client, turns: Sequence[Turn]) -> None:
        await client.wait_many(await client.submit_many(turns))

    # Workers

    def _start(self) -> _Worker:
        with open(self._log_file, "ab") as output:
            process = subprocess.Popen(
                self.settings.command(),
                env={
                    **os.environ,
                    "REDIS_URL": self._farm.url,
                    "TURNMILL_NAMESPACE": self._farm.namespace,
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=parent_death_signal(),
            )
        return _Worker(process)

    async def _first_model(self, client: Client) -> str:
        """What the workers serve, once all of them do."""
        while True:
            for worker in self._workers:
                if worker.process.poll() is not None:
                    raise UsageError(f"a worker ended: {self._last_words()}")
            infos = await client.store.workers()
            if len(infos) >= len(self._workers):
                return infos[0].model
            await asyncio.sleep(LOOK_SECONDS)

    def _last_words(self) -> str:
        lines = self._log_file.read_text(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("turnmill worker: ") if lines else "it said nothing"

    async def _watch(self, client: Client) -> None:
        while True:
            for info in await client.store.workers():
                self._seen.tokens[info.id] = max(info.tokens, self._seen.tokens.get(info.id, 0))
                for worker in self._workers:
                    if worker.process.pid == info.pid:
                        worker.id = info.id
            await asyncio.sleep(LOOK_SECONDS)

    async def _all_told(self, client: Client) -> None:
        """Wait until every worker has said what it has made in all: they tell it twice a second."""
        while True:
            infos = await client.store.workers()
            live = {worker.process.pid for worker in self._workers}
            if not any(info.running for info in infos if info.pid in live):
                break
            await asyncio.sleep(LOOK_SECONDS)
        await asyncio.sleep(LOOK_SECONDS * 2)  # _watch looks once more

    # Kills

    async def _kill_at_random(self, client: Client, answers: asyncio.Task[None]) -> None:
        while self.kills < self.settings.kills:
            pause = self.settings.pause * self._random.uniform(1, 2)
            await asyncio.wait({answers}, timeout=pause)
            if answers.done():
                log.warning("the turns were done after %d kills", self.kills)
                return
            ready = [index for index, worker in enumerate(self._workers) if worker.id]
            if ready:
                await self._kill(client, self._random.choice(ready))

    async def _kill(self, client: Client, index: int) -> None:
        victim = self._workers[index]
        os.killpg(victim.process.pid, signal.SIGKILL)  # with what its engine has started
        killed = time.monotonic()
        victim.process.wait()
        self.kills += 1
        held = await self._held_by(client, victim.id)
        log.info("killed worker %s with %d turns", victim.id, len(held))
        self._workers[index] = self._start()
        task = asyncio.create_task(self._recovery(client, victim.id, held, killed))
        self._recovering.add(task)

    async def _held_by(self, client: Client, worker: str) -> list[str]:
        """Turns in a worker's hands, by hash."""
        model = next(iter(await client.store.models()))
        owners = await client.store.redis.hgetall(self._farm.keys.owners(model))  # type: ignore[misc]
        return [hash.decode() for hash, owner in owners.items() if owner[:8].decode() == worker]

    async def _recovery(
        self, client: Client, victim: str, held: Sequence[str], killed: float
    ) -> None:
        """Wait until none of the turns is the dead worker's any more: a lapsed one keeps its owner until it is
        claimed again."""
        while True:
            if not set(held) & set(await self._held_by(client, victim)):
                break
            await asyncio.sleep(LOOK_SECONDS / 2)
        self._seen.recoveries.append(time.monotonic() - killed)

    # Namespace and report

    @contextlib.asynccontextmanager
    async def _namespace(self) -> AsyncIterator[Redis]:
        redis = self._farm.connect()
        try:
            yield redis
        finally:
            async for key in redis.scan_iter(f"{self._farm.keys.prefix}*", count=1000):
                await redis.unlink(key)
            await redis.aclose(close_connection_pool=True)

    def _client(self) -> Client:
        return Client(self._farm.url, namespace=self._farm.namespace, run=RUN, patience=None)

    async def _report(
        self, client: Client, redis: Redis, turns: Sequence[Turn], seconds: float
    ) -> DrillReport:
        found = await audit(redis, self._farm.keys, turns, RUN, self._right)
        traces = [await client.trace(turn.hash) for turn in turns]
        replies = [await client.reply(turn.hash) for turn in turns]
        tokens = sum(reply.usage.completion_tokens for reply in replies if reply)
        return DrillReport(
            turns=len(turns),
            kills=self.kills,
            lost=found.lost,
            stored_twice=found.stored_twice,
            wrong=found.wrong,
            held=found.held,
            re_run=sum(bool(trace and trace.earlier) for trace in traces),
            tokens=tokens,
            tokens_made_again=max(0, sum(self._seen.tokens.values()) - tokens),
            seconds_to_recover=round(max(self._seen.recoveries, default=0.0), 2),
            seconds=round(seconds, 1),
        )
