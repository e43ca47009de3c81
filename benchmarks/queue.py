"""`queue`: no-op turns a second of one worker, beside one stock worker of another queue.

Turns wait in the queue before the worker starts; the rate is from the first to the last that ended, so
starting up is not in it. Every measurement has a server of its own.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

import redis
from pydantic_core import from_json

from benchmarks.conditions import conditions, versions_in
from benchmarks.environments import rival_python
from benchmarks.farm import (
    cpu_seconds,
    farm_environment,
    finish_times,
    process,
    server,
    server_version,
    wait_for,
    worker_command,
)
from benchmarks.measure import Spread, interleaved, rate
from benchmarks.report import COUNT, RATIO, Result, Row
from turnmill.embedded import EmbeddedServer
from turnmill.keys import Keys
from turnmill.queue import BATCH_TURNS, Ask, Lane, Queue
from turnmill.settings import Farm
from turnmill.turn import Message, Sampling, Turn
from turnmill.wire import encode_turn

GOAL = 5.0
SLOTS = 200
ARQ = ("arq==0.28.0", "redis[hiredis]>=5,<6", "uvloop")
ARQ_MAX_JOBS = (10, 50, 100, 200)
"""Tried before the rounds: arq is measured with what suits it best here."""

TEXT = "mill" * 228
"""One word: a no-op is not to measure how fast the scripted engine counts words."""

Say = Callable[[str], None]


class Contender(Protocol):
    """A queue with its worker, on the same kind of work."""

    name: str
    turns: int

    def fill(self, on: EmbeddedServer) -> None:
        """Put `turns` turns into the queue."""

    def work(self, on: EmbeddedServer, stack: ExitStack) -> subprocess.Popen[bytes]:
        """Start one worker process."""

    def ended(self, client: redis.Redis) -> int:
        """How many have ended by now."""

    def times(self, client: redis.Redis) -> list[float]:
        """When each ended, in seconds."""


@dataclass(frozen=True)
class Measure:
    """Turns a second; CPU for each turn in microseconds, of worker and server."""

    rate: float
    worker_cpu: float
    server_cpu: float


def measure(contender: Contender, turns: int | None = None) -> Measure:
    with server() as on, redis.Redis.from_url(on.url) as client, ExitStack() as stack:
        contender.fill(on)
        worker = contender.work(on, stack)
        assert on.pid is not None
        wait_for(lambda: contender.ended(client) > 0, worker, pause=0.01)
        before = contender.ended(client), cpu_seconds(worker.pid), cpu_seconds(on.pid)
        wait_for(lambda: contender.ended(client) >= contender.turns, worker, pause=0.05)
        after = contender.ended(client), cpu_seconds(worker.pid), cpu_seconds(on.pid)
        count, worker_cpu, server_cpu = (b - a for a, b in zip(before, after, strict=True))
        return Measure(
            rate(contender.times(client)),
            1e6 * worker_cpu / max(1, count),
            1e6 * server_cpu / max(1, count),
        )


class Turnmill:
    """A worker as users start it, with the scripted engine that answers at once."""

    name = "turnmill"

    def __init__(self, turns: int) -> None:
        self.turns = turns

    @cached_property
    def _asks(self) -> list[Ask]:
        return [Ask(turn.hash, encode_turn(turn)) for turn in map(_turn, range(self.turns))]

    def fill(self, on: EmbeddedServer) -> None:
        asyncio.run(self._fill(Farm(on.url)))

    async def _fill(self, farm: Farm) -> None:
        client = farm.connect()
        queue = Queue(client, farm.keys)
        for start in range(0, self.turns, BATCH_TURNS):
            await queue.enqueue("sim", self._asks[start : start + BATCH_TURNS], Lane("bench"))
        await client.aclose(close_connection_pool=True)

    def work(self, on: EmbeddedServer, stack: ExitStack) -> subprocess.Popen[bytes]:
        return stack.enter_context(process(worker_command(SLOTS), farm_environment(Farm(on.url))))

    def ended(self, client: redis.Redis) -> int:
        done = client.hget(Keys().run("bench"), "done")
        assert done is None or isinstance(done, bytes)
        return int(done or 0)

    def times(self, client: redis.Redis) -> list[float]:
        return finish_times(client, "sim")


class Arq:
    """A stock arq worker in an environment of its own, JSON instead of pickle, results stored."""

    name = "arq"

    def __init__(self, python: Path, turns: int, max_jobs: int) -> None:
        self.turns, self._max_jobs = turns, max_jobs
        self._script = [python, Path(__file__).parent / "rivals" / "arq_jobs.py"]

    def fill(self, on: EmbeddedServer) -> None:
        subprocess.run([*self._script, "fill", _path(on), str(self.turns)], check=True)

    def work(self, on: EmbeddedServer, stack: ExitStack) -> subprocess.Popen[bytes]:
        return stack.enter_context(process([*self._script, "work", _path(on), str(self._max_jobs)]))

    def ended(self, client: redis.Redis) -> int:
        left = client.zcard("arq:queue")
        assert isinstance(left, int)
        return self.turns - left

    def times(self, client: redis.Redis) -> list[float]:
        keys = list(client.scan_iter("arq:result:*", count=1000))
        times = []
        for start in range(0, len(keys), 500):
            results = client.mget(keys[start : start + 500])
            assert isinstance(results, list)
            times += [from_json(raw)["ft"] / 1000 for raw in results]
        return times


def run(rounds: int, say: Say) -> Result:
    python = rival_python("arq", ARQ, say)
    ours = Turnmill(turns=19_000)
    max_jobs = _best_max_jobs(python, say)
    rival = Arq(python, 3_000, max_jobs)
    contenders = {c.name: partial(measure, c) for c in (ours, rival)}
    measured = interleaved(contenders, rounds, say)
    rates = {n: Spread.of([m.rate for m in measures]) for n, measures in measured.items()}
    rows = [
        Row("ratio_vs_arq", "turnmill / arq", rates["turnmill"].over(rates["arq"]), RATIO, GOAL)
    ]
    for name, measures in measured.items():
        worker = Spread.of([m.worker_cpu for m in measures])
        redis_cpu = Spread.of([m.server_cpu for m in measures])
        rows += [
            Row(f"{name}_turns_per_s", f"{name}, turns/s", rates[name], COUNT),
            Row(f"{name}_worker_us", f"{name}, worker's CPU a turn, µs", worker, COUNT),
            Row(f"{name}_server_us", f"{name}, server's CPU a turn, µs", redis_cpu, COUNT),
        ]
    body = len(encode_turn(_turn(0)))
    return Result(
        "queue",
        "No-op turns, one worker",
        rows,
        {
            "turnmill": f"sim engine, no latency, {SLOTS} slots; {ours.turns:,} turns of {body} B "
            "queued before; reply and trace stored",
            "arq": f"max_jobs {max_jobs} (the best of {', '.join(map(str, ARQ_MAX_JOBS))}), "
            f"poll_delay 0.01, JSON, uvloop; {rival.turns:,} jobs of about 1 kB queued before; "
            "results of the same size stored",
            "measured": "from the first to the last that ended",
        },
        conditions(server_version())
        | {"rival's": versions_in(python, ("arq", "redis", "hiredis", "uvloop"))},
    )


def _best_max_jobs(python: Path, say: Say) -> int:
    rates = {}
    for max_jobs in ARQ_MAX_JOBS:
        rates[max_jobs] = measure(Arq(python, 1_000, max_jobs)).rate
        say(f"trying arq with max_jobs {max_jobs}: {rates[max_jobs]:.0f} jobs/s")
    return max(rates, key=lambda max_jobs: rates[max_jobs])


def _turn(number: int) -> Turn:
    return Turn(
        model="sim",
        messages=[
            Message(role="system", content=TEXT),
            Message(role="user", content=f"Turn {number}."),
        ],
        sampling=Sampling(temperature=0),
    )


def _path(on: EmbeddedServer) -> str:
    return on.url.removeprefix("unix://")
