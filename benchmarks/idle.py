"""`idle`: how soon one turn, put into an idle farm, is in the engine; and what an idle worker costs."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from dataclasses import dataclass

import redis

from benchmarks.conditions import conditions
from benchmarks.contenders import Say
from benchmarks.farm import (
    cpu_seconds,
    farm_environment,
    process,
    server,
    server_version,
    wait_for,
    worker_command,
)
from benchmarks.measure import Spread
from benchmarks.report import Result, Row
from benchmarks.turns import RUN, turn
from turnmill.client import Client
from turnmill.settings import Farm

GOAL_P50_MS, GOAL_P99_MS, GOAL_CORE = 5.0, 20.0, 0.02
TURNS = 300
LONGEST_PAUSE = 0.05
"""Seconds between turns, at random: a turn may come at any moment of the worker's own rhythm."""
IDLE_SECONDS = 10.0
ROUNDS = 5
"""At most: a round takes half a minute."""


@dataclass(frozen=True)
class Measure:
    """`core`: share of a core of an idle worker. `milliseconds`: from submit to engine, for each turn."""

    core: float
    milliseconds: list[float]

    def percentile(self, which: int) -> float:
        return statistics.quantiles(self.milliseconds, n=100)[which - 1]


def run(rounds: int, say: Say) -> Result:
    measured = []
    for number in range(min(rounds, ROUNDS)):
        say(f"round {number + 1} of {min(rounds, ROUNDS)}")
        measured.append(_measure())
    return Result(
        "idle",
        "An idle farm",
        [
            Row(
                f"submit_to_engine_p{which}_ms",
                f"submit to engine, ms, p{which}",
                Spread.of([m.percentile(which) for m in measured]),
                "{:.1f}",
                goal,
                "below",
            )
            for which, goal in ((50, GOAL_P50_MS), (99, GOAL_P99_MS))
        ]
        + [
            Row(
                "idle_core",
                "idle worker, share of a core",
                Spread.of([m.core for m in measured]),
                "{:.4f}",
                GOAL_CORE,
                "below",
            )
        ],
        {
            "submit": f"from Client.ask, hashing included, to the moment at which the engine got the turn (trace: sent); "
            f"{TURNS} turns of 1 kB a round, one at a time, up to {1000 * LONGEST_PAUSE:g} ms apart",
            "idle": f"CPU of one worker process with the sim engine over {IDLE_SECONDS:g} s without a turn",
        },
        conditions(server_version()),
        interleaved=False,
    )


def _measure() -> Measure:
    with server() as on, redis.Redis.from_url(on.url) as client:
        farm = Farm(on.url)
        with process(worker_command(64), farm_environment(farm)) as worker:
            wait_for(lambda: client.scard(farm.keys.workers) == 1, worker)
            milliseconds = asyncio.run(_one_by_one(farm))
            before = cpu_seconds(worker.pid)
            time.sleep(IDLE_SECONDS)
            return Measure((cpu_seconds(worker.pid) - before) / IDLE_SECONDS, milliseconds)


async def _one_by_one(farm: Farm) -> list[float]:
    submitted: dict[str, float] = {}
    async with Client(farm.url, run=RUN) as client:
        await client.ask(turn(-1))  # its connections and the worker's are made
        for number in range(TURNS):
            await asyncio.sleep(random.uniform(0, LONGEST_PAUSE))
            asked, now = turn(number), time.time()
            await client.ask(asked)
            submitted[asked.hash] = now
        took = []
        for hash, at in submitted.items():
            trace = await client.trace(hash)
            assert trace is not None
            assert trace.times.sent is not None
            took.append(1000 * (trace.times.sent - at))
    return took
