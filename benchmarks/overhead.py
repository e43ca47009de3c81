"""`overhead`: what the queue costs a busy engine, as a share of what the engine could do alone.

The scripted engine takes exactly as long for a turn as it is told to, so its own best is known: slots divided
by latency. Many conversations wait; the rate is taken from the middle of the run, when all slots are in use.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

import redis

from benchmarks.conditions import conditions
from benchmarks.farm import (
    farm_environment,
    finish_times,
    process,
    server,
    server_version,
    worker_command,
)
from benchmarks.measure import Spread, slope
from benchmarks.report import COUNT, Result, Row
from turnmill.budget import FailureBudget
from turnmill.client import Client
from turnmill.conversations import Conversation
from turnmill.output import RunFiles
from turnmill.run import Run
from turnmill.run_settings import RunSettings
from turnmill.scaffolds.multi_turn_chat import multi_turn_chat
from turnmill.settings import Farm
from turnmill.turn import Message

GOAL = 0.97
SLOTS, LATENCY = 64, 0.2
CONVERSATIONS, TURNS = 960, 3
AT_ONCE = 320
FIRST, LAST = AT_ONCE, (CONVERSATIONS - AT_ONCE) * TURNS
"""Turns between which the rate is taken: all slots are in use, and as many conversations wait as at first."""

Say = Callable[[str], None]


def run(rounds: int, say: Say) -> Result:
    ideal = SLOTS / LATENCY
    rates = []
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        rates.append(_rate())
    measured = Spread.of(rates)
    return Result(
        "overhead",
        "A busy engine behind the queue",
        [
            Row(
                "share_of_ideal",
                "turns/s, share of the ideal",
                Spread.of([r / ideal for r in rates]),
                "{:.3f}",
                GOAL,
            ),
            Row("turns_per_s", f"turns/s (the ideal is {ideal:.0f})", measured, COUNT),
        ],
        {
            "turnmill": f"sim engine, {SLOTS} slots, {LATENCY:g} s a turn; a run of {CONVERSATIONS} conversations "
            f"of {TURNS} turns, {AT_ONCE} at once, by one producer process",
            "measured": f"from the {FIRST}th turn to the {LAST:,}th, while at least {AT_ONCE - SLOTS} conversations wait",
        },
        conditions(server_version()),
        interleaved=False,
    )


def _rate() -> float:
    with server() as on, tempfile.TemporaryDirectory() as folder:
        farm = Farm(on.url)
        arguments = ("--latency", str(LATENCY), "--answer", "history-hash")
        with process(worker_command(SLOTS, *arguments), farm_environment(farm)):
            asyncio.run(_drive(farm, Path(folder)))
        with redis.Redis.from_url(on.url) as client:
            times = sorted(finish_times(client, "sim"))
    return slope(times[FIRST:LAST])


async def _drive(farm: Farm, folder: Path) -> None:
    conversations = [
        Conversation(
            id=f"c{i}",
            turns=[
                Message(role="user", content=f"Conversation {i}, turn {k}. " * 20)
                for k in range(TURNS)
            ],
        )
        for i in range(CONVERSATIONS)
    ]
    settings = RunSettings(
        name="bench", model="sim", concurrency=AT_ONCE, max_failures=FailureBudget.parse("0")
    )
    with RunFiles(folder, "bench") as files:
        async with Client(farm.url, run="bench", patience=None) as client:
            end = await Run(settings, conversations, multi_turn_chat, client, files).drive()
    assert end.report.outcomes.completed == CONVERSATIONS
