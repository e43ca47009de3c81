"""`slots`: many workers, idle, and turns that last: how soon are all of their slots full?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import redis

from benchmarks.conditions import conditions, versions_in
from benchmarks.contenders import KINDS, Say
from benchmarks.environments import rival_python
from benchmarks.farm import (
    farm_environment,
    process,
    server,
    server_version,
    socket_path,
    wait_for,
    worker_command,
)
from benchmarks.measure import Spread, interleaved
from benchmarks.report import COUNT, Result, Row
from benchmarks.turns import MODEL, asks, fill_now
from turnmill.client import Client
from turnmill.keys import Keys
from turnmill.settings import Farm

GOAL_SECONDS = 3.0
WORKERS, SLOTS = 12, 100
ALL = WORKERS * SLOTS
ROUNDS = 3
"""At most: a round starts two dozen processes."""
ARQ_SECONDS = 10.0
"""How long arq is watched: longer than turnmill takes."""
SETTLE_SECONDS = 2.0
SCRIPT = Path(__file__).parent / "rivals" / "arq_jobs.py"


@dataclass(frozen=True)
class Filling:
    """Seconds since turns began to be put in, and how many slots were full by then."""

    curve: list[tuple[float, int]]

    @property
    def seconds(self) -> float:
        """Until all are full; infinite if they never were."""
        return next((at for at, full in self.curve if full >= ALL), float("inf"))

    def full_after(self, seconds: float) -> int:
        return max((full for at, full in self.curve if at <= seconds), default=0)


def run(rounds: int, say: Say) -> Result:
    python = rival_python("arq", KINDS["arq"].requirements, say)
    contenders: dict[str, Callable[[], Filling]] = {
        "turnmill": _turnmill,
        "arq": partial(_arq, python),
    }
    measured = interleaved(contenders, min(rounds, ROUNDS), say)
    ours, theirs = measured["turnmill"], measured["arq"]
    then = [a.full_after(t.seconds) for t, a in zip(ours, theirs, strict=True)]
    return Result(
        "slots",
        f"{WORKERS} workers of {SLOTS} slots, turns that last an hour",
        [
            Row(
                "seconds",
                f"turnmill: seconds until {ALL:,} slots are full",
                Spread.of([filling.seconds for filling in ours]),
                goal=GOAL_SECONDS,
                better="below",
            ),
            Row("arq_full_then", "arq: slots full after the same time", Spread.of(then), COUNT),
            Row(
                "arq_full_later",
                f"arq: slots full after {ARQ_SECONDS:g} s",
                Spread.of([filling.full_after(ARQ_SECONDS) for filling in theirs]),
                COUNT,
            ),
        ],
        {
            "turnmill": f"{WORKERS} worker processes, registered and idle; sim engine, {SLOTS} slots; {ALL:,} turns of "
            "1 kB are put in, and the time runs from the first ENQUEUE; full: leased, and "
            "reported as running by all workers some seconds later",
            "arq": f"{WORKERS} worker processes with max_jobs {SLOTS}, idle; {ALL:,} jobs by enqueue_job, many at once; "
            "the time runs "
            "from the first of them; full: in progress; "
            + versions_in(python, KINDS["arq"].packages),
        },
        conditions(server_version()),
    )


def _turnmill() -> Filling:
    turns = list(asks(0, ALL))
    with server() as on, redis.Redis.from_url(on.url) as client, ExitStack() as stack:
        farm, keys = Farm(on.url), Keys()
        command = worker_command(SLOTS, "--latency", "3600")
        workers = [
            stack.enter_context(process(command, farm_environment(farm))) for _ in range(WORKERS)
        ]
        wait_for(lambda: client.scard(keys.workers) == WORKERS, *workers)
        time.sleep(SETTLE_SECONDS)
        started = time.monotonic()
        fill_now(farm, turns)
        filling = _watch(started, lambda: int(client.zcard(keys.leases(MODEL))), 60.0)
        wait_for(lambda: asyncio.run(_running(farm)) == ALL, *workers)
        for worker in workers:
            worker.kill()  # polite ends would hand back a thousand turns
        return filling


async def _running(farm: Farm) -> int:
    async with Client(farm.url) as client:
        return sum(worker.running for worker in await client.store.workers())


def _arq(python: Path) -> Filling:
    with server() as on, redis.Redis.from_url(on.url) as client, ExitStack() as stack:
        script: list[str | Path] = [python, SCRIPT]
        path = socket_path(on)
        workers = [
            stack.enter_context(process([*script, "hold", path, str(SLOTS)]))
            for _ in range(WORKERS)
        ]
        wait_for(lambda: len(client.client_list(_type="normal")) > WORKERS, *workers)
        time.sleep(SETTLE_SECONDS)
        filler = stack.enter_context(process([*script, "enqueue_many", path, str(ALL)]))
        wait_for(lambda: bool(client.exists("arq:queue")), *workers, pause=0.001)
        started = time.monotonic()
        filling = _watch(started, lambda: len(client.keys("arq:in-progress:*")), ARQ_SECONDS)
        filler.wait()
        for worker in workers:
            worker.kill()
        return filling


def _watch(started: float, full: Callable[[], int], seconds: float) -> Filling:
    """Count full slots until all are, or time is up."""
    curve: list[tuple[float, int]] = []
    while not curve or (curve[-1][1] < ALL and curve[-1][0] < seconds):
        now_full = full()
        curve.append((time.monotonic() - started, now_full))
        time.sleep(0.005)
    return Filling(curve)
