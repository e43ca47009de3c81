"""`gateway-load`: a trace of requests against gateways, and what they add to the time that the engine takes.

The scripted engine takes exactly as long for a turn as it is told to, and has a slot for each; so whatever is above that is
the way through gateway, queue and worker, and back.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

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
from benchmarks.load import ANSWER, HANGS_UP, STREAMS, Outcome, play, requests
from benchmarks.measure import Spread
from benchmarks.report import COUNT, Result, Row
from benchmarks.trace import Arrival, generated, read
from benchmarks.turns import MODEL
from turnmill.queue import Queue
from turnmill.settings import Farm

GATEWAYS, WORKERS = 2, 2
SLOTS, LATENCY, TOKENS_PER_SECOND = 512, 0.1, 50
COUNT_GENERATED, SECONDS, LONGEST = 450, 60.0, 1000
SEED = 1
ROUNDS = 3
"""At most: a round takes as long as the trace."""
LEFT_SECONDS = 90.0
"""By then nothing may be left: what clients have left is cancelled after half a minute."""


@dataclass(frozen=True)
class Measure:
    """`cpu`: seconds of all gateways while the load was played. `left`: turns in the queue when it should be empty."""

    outcomes: list[Outcome]
    cpu: float
    left: int

    @property
    def problems(self) -> list[str]:
        return [one.problem for one in self.outcomes if one.problem]

    def over_whole(self) -> list[float]:
        """Seconds above what the engine takes."""
        return [_over(one) for one in self._right() if not one.request.stream]

    def over_streamed(self) -> list[float]:
        return [_over(one) for one in self._right() if one.request.stream]

    def over_first(self) -> list[float]:
        return [one.first - LATENCY for one in self.outcomes if one.first is not None]

    def late(self) -> list[float]:
        return [one.late for one in self.outcomes]

    def cpu_ms(self) -> float:
        return 1000 * self.cpu / len(self.outcomes)

    def _right(self) -> list[Outcome]:
        return [one for one in self.outcomes if not one.problem and not one.hung_up]


Figure = Callable[[Measure], float]


def _over(outcome: Outcome) -> float:
    return outcome.took - LATENCY - (outcome.request.tokens - 1) / TOKENS_PER_SECOND


def run(rounds: int, say: Say, trace: Path | None = None, speed: float = 1.0) -> Result:
    """`trace`: a file; without one, a trace is generated. `speed`: how many times as fast as it came. Raises UsageError
    for a file that is none."""
    if trace is None:
        arrivals = generated(SEED, COUNT_GENERATED, SECONDS, longest=LONGEST)
    else:
        arrivals = read(trace)
    measured = []
    for number in range(min(rounds, ROUNDS)):
        say(f"round {number + 1} of {min(rounds, ROUNDS)}")
        measured.append(_measure(arrivals, speed))

    def row(key: str, text: str, of: Figure, form: str = COUNT, goal: float | None = None) -> Row:
        return Row(key, text, Spread.of([of(one) for one in measured]), form, goal, "below")

    def times(key: str, text: str, of: Callable[[Measure], list[float]]) -> list[Row]:
        return [
            row(f"{key}_p{which}_ms", f"{text}, ms, p{which}", _Percentile(of, which))
            for which in (50, 99)
        ]

    problems = {problem for one in measured for problem in one.problems}
    return Result(
        "gateway-load",
        f"{trace.name if trace else 'A generated trace'} through {GATEWAYS} gateways, at {speed:g} times its pace",
        [
            row("requests", "requests", lambda m: len(m.outcomes)),
            row("hung_up", "of these hung up", lambda m: sum(o.hung_up for o in m.outcomes)),
            row("wrong", "not answered, or wrongly", lambda m: len(m.problems), goal=0),
            row("left", "turns left in the queue", lambda m: m.left, goal=0),
            *times("whole", "whole answer, over the engine's time", Measure.over_whole),
            *times("stream", "stream to its end, over the engine's time", Measure.over_streamed),
            *times("first", "first text, over the engine's time", Measure.over_first),
            *times("late", "asked after it was due", Measure.late),
            row("cpu_ms", "CPU of a gateway for a request, ms", Measure.cpu_ms, "{:.1f}"),
        ],
        {
            "load": f"{len(arrivals)} requests in {arrivals[-1].at / speed:.0f} s; {STREAMS:.0%} of them stream, and {HANGS_UP:.0%} of "
            "these hang up after the first text; outside a run, in a run, and in an attempt at it",
            "farm": f"{WORKERS} workers with the sim engine, {SLOTS} slots each, {LATENCY:g} s to the first token, then "
            f"{TOKENS_PER_SECOND} tokens/s; on one machine with the gateways and the client",
        },
        conditions(server_version()),
        notes=sorted(problems)[:5],
        interleaved=False,
    )


@dataclass(frozen=True)
class _Percentile:
    """Of seconds, in milliseconds."""

    of: Callable[[Measure], list[float]]
    which: int

    def __call__(self, measure: Measure) -> float:
        return 1000 * statistics.quantiles(self.of(measure), n=100)[self.which - 1]


def _measure(arrivals: Sequence[Arrival], speed: float) -> Measure:
    # The prompt's words, its role, and the answer.
    context = str(1 + max(one.prompt for one in arrivals) + max(one.answer for one in arrivals))
    engine = (*ANSWER, "--latency", str(LATENCY), "--tokens-per-second", str(TOKENS_PER_SECOND))
    worker = worker_command(SLOTS, *engine, "--context", context)
    with server() as on, redis.Redis.from_url(on.url) as client, ExitStack() as stack:
        farm = Farm(on.url)
        environment = farm_environment(farm)
        workers = [
            stack.enter_context(process(command, environment)) for command in [worker] * WORKERS
        ]
        wait_for(lambda: client.scard(farm.keys.workers) == WORKERS, *workers)
        ports = [_free_port() for _ in range(GATEWAYS)]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        serve = (sys.executable, "-m", "turnmill", "serve", "--insecure", "--port")
        gateways = [
            stack.enter_context(process([*serve, str(port)], environment)) for port in ports
        ]
        wait_for(lambda: all(map(_ready, urls)), *gateways)
        before = sum(cpu_seconds(gateway.pid) for gateway in gateways)
        outcomes = asyncio.run(play(urls, requests(arrivals, SEED, "load"), speed))
        cpu = sum(cpu_seconds(gateway.pid) for gateway in gateways) - before
        return Measure(outcomes, cpu, asyncio.run(_left(farm)))


async def _left(farm: Farm) -> int:
    """How many turns are in the queue when it is empty, or has had its time."""
    loop = asyncio.get_running_loop()
    end = loop.time() + LEFT_SECONDS
    async with farm.connect() as client:
        while True:
            depth = await Queue(client, farm.keys).depth(MODEL)
            left = depth.queued + depth.running + depth.due + depth.suspects
            if not left or loop.time() > end:
                return left
            await asyncio.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready") as response:
            return bool(response.status == 200)
    except urllib.error.URLError:
        return False
