"""`enqueue`: turns of 1 kB into the queue, from building their models to Redis's answer, beside arq's `enqueue_job`.

Every measurement has a server of its own, and no worker.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions, versions_in
from benchmarks.contenders import KINDS, Say
from benchmarks.environments import rival_python
from benchmarks.farm import cpu_seconds, server, server_version, socket_path
from benchmarks.measure import Spread, interleaved
from benchmarks.report import COUNT, RATIO, Result, Row
from benchmarks.turns import MODEL, RUN, turn
from turnmill.client import Client
from turnmill.embedded import EmbeddedServer
from turnmill.queue import BATCH_TURNS, Ask, Lane, Queue
from turnmill.settings import Farm
from turnmill.wire import encode_turn

GOAL = 3.0
TURNS, JOBS = 20_000, 4_000
SCRIPT = Path(__file__).parent / "rivals" / "arq_jobs.py"


@dataclass(frozen=True)
class Measure:
    """Turns a second, and the share of the time for which the server was at work."""

    rate: float
    server_share: float


def run(rounds: int, say: Say) -> Result:
    python = rival_python("arq", KINDS["arq"].requirements, say)
    contenders: dict[str, Callable[[], Measure]] = {
        "turnmill": partial(_measure, partial(_ours, _in_batches), TURNS),
        "client": partial(_measure, partial(_ours, _by_client), TURNS),
        "arq_one": partial(_measure, partial(_arq, python, "enqueue_one"), JOBS),
        "arq_many": partial(_measure, partial(_arq, python, "enqueue_many"), JOBS),
    }
    measured = interleaved(contenders, rounds, say)
    rates = {name: Spread.of([m.rate for m in of]) for name, of in measured.items()}
    shares = {name: Spread.of([m.server_share for m in of]) for name, of in measured.items()}
    ours, client, rival = rates["turnmill"], rates["client"], rates["arq_many"]
    rows = [
        Row("ratio_vs_arq", "turnmill / arq, many at once", ours.over(rival), RATIO, GOAL),
        Row("ratio_vs_arq_one", "turnmill / arq, one by one", ours.over(rates["arq_one"]), RATIO),
        Row("client_vs_arq", "Client / arq, many at once", client.over(rival), RATIO),
    ]
    names = {
        "turnmill": "turnmill",
        "client": "Client",
        "arq_one": "arq, one by one",
        "arq_many": "arq, many at once",
    }
    for key, text in names.items():
        rows += [
            Row(f"{key}_turns_per_s", f"{text}: turns/s", rates[key], COUNT),
            Row(f"{key}_server_share", f"{text}: server at work, share", shares[key]),
        ]
    size = len(encode_turn(turn(0)))
    return Result(
        "enqueue",
        "Turns into the queue",
        rows,
        {
            "turnmill": f"{TURNS:,} turns of {size} B: models built, hashed, encoded, ENQUEUE in batches of {BATCH_TURNS}; the "
            "next batch is made while Redis takes one",
            "Client": "the same turns by one Client.submit_many, which also waits for their endings from then on",
            "arq": f"{JOBS:,} jobs of about 1 kB by enqueue_job, JSON, uvloop: each awaited, or 100 in one asyncio.gather; "
            + versions_in(python, KINDS["arq"].packages),
        },
        conditions(server_version()),
    )


def _measure(put_in: Callable[[EmbeddedServer, int], float], count: int) -> Measure:
    with server() as on:
        assert on.pid is not None
        before = cpu_seconds(on.pid)
        seconds = put_in(on, count)
        return Measure(count / seconds, (cpu_seconds(on.pid) - before) / seconds)


def _ours(
    put_in: Callable[[Farm, int], Coroutine[Any, Any, float]], on: EmbeddedServer, count: int
) -> float:
    return asyncio.run(put_in(Farm(on.url), count))


async def _in_batches(farm: Farm, count: int) -> float:
    async with farm.connect() as redis:
        queue = Queue(redis, farm.keys)
        await redis.ping()
        started = time.perf_counter()
        sending: asyncio.Task[Any] | None = None
        for first in range(0, count, BATCH_TURNS):
            turns = map(turn, range(first, first + BATCH_TURNS))
            batch = [Ask(turn.hash, encode_turn(turn)) for turn in turns]
            if sending:
                await sending
            sending = asyncio.create_task(queue.enqueue(MODEL, batch, Lane(RUN)))
            await asyncio.sleep(0)
        if sending:
            await sending
        return time.perf_counter() - started


async def _by_client(farm: Farm, count: int) -> float:
    async with Client(farm.url, run=RUN) as client:
        await client.status()
        started = time.perf_counter()
        await client.submit_many(map(turn, range(count)))
        return time.perf_counter() - started


def _arq(python: Path, command: str, on: EmbeddedServer, count: int) -> float:
    line: list[str | Path] = [python, SCRIPT, command, socket_path(on), str(count)]
    return float(subprocess.run(line, check=True, capture_output=True, text=True).stdout)
