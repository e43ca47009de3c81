"""`waiters`: one process that awaits ten thousand turns: what waiting costs, and how late endings arrive."""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.conditions import conditions
from benchmarks.contenders import Say
from benchmarks.farm import farm_environment, process, server, server_version, worker_command
from benchmarks.measure import Spread
from benchmarks.report import Result, Row
from benchmarks.turns import MODEL, RUN, turn
from turnmill.client import POLL_SECONDS, Client
from turnmill.reply import Reply
from turnmill.settings import Farm

GOAL_CORE, GOAL_SECONDS = 0.02, 0.5
TURNS = 10_000
WAIT_SECONDS = 2 * POLL_SECONDS
"""Two slow polls of everything that is awaited are in it."""
SLOTS, LATENCY = 500, 0.2
ROUNDS = 3
"""At most: a round is mostly waiting."""


@dataclass(frozen=True)
class Measure:
    """`core`: share of a core while nothing ends. `late`: seconds from a turn's entry in the stream of finished turns
    to its result in the process, for each turn."""

    core: float
    late: list[float]

    def percentile(self, which: int) -> float:
        return statistics.quantiles(self.late, n=100)[which - 1]


def run(rounds: int, say: Say) -> Result:
    measured = []
    for number in range(min(rounds, ROUNDS)):
        say(f"round {number + 1} of {min(rounds, ROUNDS)}")
        with server() as on:
            measured.append(asyncio.run(_measure(Farm(on.url))))
    return Result(
        "waiters",
        f"{TURNS:,} turns awaited in one process",
        [
            Row(
                "core_waiting",
                "share of a core while nothing ends",
                Spread.of([m.core for m in measured]),
                "{:.4f}",
                GOAL_CORE,
                "below",
            ),
            Row(
                "delivered_p99_s",
                "from the stream to the result, seconds, p99",
                Spread.of([m.percentile(99) for m in measured]),
                "{:.3f}",
                GOAL_SECONDS,
                "below",
            ),
            Row(
                "delivered_p50_s",
                "from the stream to the result, seconds, p50",
                Spread.of([m.percentile(50) for m in measured]),
                "{:.3f}",
            ),
        ],
        {
            "waiting": f"Client.ask for each of {TURNS:,} turns of 1 kB; CPU of the process over {WAIT_SECONDS:g} s, slow "
            "polls included, while no worker is there",
            "delivery": f"then one worker answers them: sim engine, {SLOTS} slots, {LATENCY:g} s a turn",
        },
        conditions(server_version()),
        interleaved=False,
    )


async def _measure(farm: Farm) -> Measure:
    turns = [turn(number) for number in range(TURNS)]
    arrived: dict[str, float] = {}
    async with Client(farm.url, run=RUN) as client:

        async def ask(number: int) -> None:
            ending = await client.ask(turns[number])
            arrived[turns[number].hash] = time.time()
            assert isinstance(ending, Reply)

        asking = asyncio.gather(*(ask(number) for number in range(TURNS)))
        await client.submit_many(turns)  # all are in the queue, once this is back
        await asyncio.sleep(1)  # what asking left to do
        before = time.process_time()
        await asyncio.sleep(WAIT_SECONDS)
        core = (time.process_time() - before) / WAIT_SECONDS
        with ExitStack() as stack:
            command = worker_command(SLOTS, "--latency", str(LATENCY))
            stack.enter_context(process(command, farm_environment(farm)))
            await asking
        async with farm.connect() as redis:
            entries = await redis.xrange(farm.keys.finished(MODEL))
    stored = {entry[b"h"].decode(): int(at.partition(b"-")[0]) / 1000 for at, entry in entries}
    return Measure(core, [arrived[hash] - at for hash, at in stored.items()])
