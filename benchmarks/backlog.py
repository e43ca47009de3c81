"""`backlog`: a worker with a million turns queued, beside one with a thousand; a claim, and Redis's memory.

Both servers are filled once and stay. While a worker is measured, a producer puts in as many turns as end, so that
each queue keeps its length. Rewrites of the AOF are off: one at a bad moment would be all that is measured.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import redis
from redis.asyncio import Redis as AsyncRedis

from benchmarks.conditions import conditions
from benchmarks.contenders import SLOTS, Say
from benchmarks.farm import (
    farm_environment,
    finish_times,
    process,
    server,
    server_version,
    worker_command,
)
from benchmarks.measure import Spread, interleaved, rate
from benchmarks.report import COUNT, RATIO, Result, Row
from benchmarks.turns import MODEL, RUN, asks, fill
from turnmill.embedded import EmbeddedServer
from turnmill.keys import Keys
from turnmill.queue import BATCH_TURNS, Ask, Lane, Queue
from turnmill.settings import Farm
from turnmill_worker.scripts import CLAIM, RECOVER

GOAL, GOAL_CLAIM_MS, GOAL_BYTES = 0.9, 5.0, 350.0
MANY, FEW = 1_000_000, 1_000
MEASURED, WARM_UP = 15_000, 2_000
CLAIMS, CLAIM_TURNS = 9, 100
FILL_TURNS = 50_000


@dataclass
class Backlog:
    """A server with so many turns queued. `fresh`: turns that it has not seen yet."""

    on: EmbeddedServer
    queued: int
    claims: int = 0
    fresh: Iterator[Ask] = field(init=False)

    def __post_init__(self) -> None:
        self.fresh = asks(0, 100 * MANY)

    @property
    def farm(self) -> Farm:
        return Farm(self.on.url)

    def take(self, count: int) -> list[Ask]:
        return [next(self.fresh) for _ in range(count)]

    def fill(self, say: Say) -> tuple[float, float]:
        """Fills the queue. Returns turns a second, and Redis's memory (bytes) for a turn beyond its body."""
        with redis.Redis.from_url(self.on.url) as client:
            client.config_set("auto-aof-rewrite-percentage", 0)
            before = _used_memory(client)
            bodies, seconds = 0, 0.0
            for start in range(0, self.queued, FILL_TURNS):
                some = self.take(min(FILL_TURNS, self.queued - start))
                bodies += sum(len(ask.body) for ask in some)
                started = time.perf_counter()
                asyncio.run(fill(self.farm, some))
                seconds += time.perf_counter() - started
                say(f"{start + len(some):,} of {self.queued:,} turns queued")
            memory = (_used_memory(client) - before - bodies) / self.queued
        return self.queued / seconds, memory

    def turns_per_s(self) -> float:
        return asyncio.run(self._turns_per_s())

    async def _turns_per_s(self) -> float:
        """Of one worker, once it has warmed up. The queue keeps its length."""
        wanted = WARM_UP + MEASURED
        ready = [self.take(BATCH_TURNS) for _ in range(-(-wanted // BATCH_TURNS) + 4)]
        async with self.farm.connect() as client:
            queue = Queue(client, self.farm.keys)
            await client.delete(self.farm.keys.finished(MODEL))
            before = ended = await _done(client)
            with process(worker_command(SLOTS), farm_environment(self.farm)) as worker:
                put_in = 0
                while ended - before < wanted:
                    if worker.poll() is not None:
                        raise RuntimeError(f"the worker ended with {worker.returncode}")
                    ended = await _done(client)
                    while ready and put_in + BATCH_TURNS <= ended - before:
                        await queue.enqueue(MODEL, ready.pop(), Lane(RUN))
                        put_in += BATCH_TURNS
                    await asyncio.sleep(0.01)
                worker.terminate()
                await asyncio.to_thread(worker.wait)
            await fill(self.farm, self.take(await _done(client) - before - put_in))
        with redis.Redis.from_url(self.on.url) as sync:
            times = sorted(finish_times(sync, MODEL))
        return rate(times[WARM_UP:wanted])

    def claim_ms(self) -> list[float]:
        """Milliseconds of CLAIM calls, round trip included. The turns go back afterwards."""
        prefixes = self.farm.keys.prefix, self.farm.keys.queue(MODEL)
        took = []
        with redis.Redis.from_url(self.on.url) as client:
            for script in (CLAIM, RECOVER):
                client.script_load(script.text)
            tokens = [f"benchmrk{self.claims + i:016x}" for i in range(CLAIMS)]
            self.claims += CLAIMS
            for token in tokens:
                started = time.perf_counter()
                client.evalsha(CLAIM.sha, 2, *prefixes, token, str(CLAIM_TURNS), "0", "4194304")
                took.append(1000 * (time.perf_counter() - started))
            assert client.zcard(self.farm.keys.leases(MODEL)) == CLAIMS * CLAIM_TURNS
            for token in tokens:
                client.evalsha(RECOVER.sha, 2, *prefixes, token)
        return took


@dataclass(frozen=True)
class Measure:
    rate: float
    claim_ms: float
    """Median of one round's calls."""


def run(rounds: int, say: Say) -> Result:
    with server() as on_many, server() as on_few:
        many, few = Backlog(on_many, MANY), Backlog(on_few, FEW)
        filled, memory = many.fill(say)
        few.fill(say)
        measured = interleaved(
            {"many": partial(_measure, many), "few": partial(_measure, few)}, rounds, say
        )
    rates = {name: Spread.of([m.rate for m in of]) for name, of in measured.items()}
    claims = {name: Spread.of([m.claim_ms for m in of]) for name, of in measured.items()}
    size = len(next(asks(0, 1)).body)
    return Result(
        "backlog",
        f"{MANY:,} turns queued",
        [
            Row(
                "ratio_vs_1000",
                f"turns/s: {MANY:,} queued / {FEW:,} queued",
                rates["many"].over(rates["few"]),
                RATIO,
                GOAL,
            ),
            Row(
                "claim_ms",
                f"claim of {CLAIM_TURNS} at {MANY:,} queued, ms",
                claims["many"],
                "{:.1f}",
                GOAL_CLAIM_MS,
                "below",
            ),
            Row("claim_ms_1000", f"the same at {FEW:,} queued, ms", claims["few"], "{:.1f}"),
            Row(
                "bytes_beyond_body",
                "Redis memory of a queued turn beyond its body, bytes",
                Spread.of([memory]),
                COUNT,
                GOAL_BYTES,
                "below",
            ),
            Row("many_turns_per_s", f"turns/s, {MANY:,} queued", rates["many"], COUNT),
            Row("few_turns_per_s", f"turns/s, {FEW:,} queued", rates["few"], COUNT),
            Row("fill_turns_per_s", "turns/s of filling", Spread.of([filled]), COUNT),
        ],
        {
            "turnmill": f"one worker, sim engine, no latency, {SLOTS} slots; turns of {size} B; a producer puts in "
            f"{BATCH_TURNS} for each {BATCH_TURNS} that end; {MEASURED:,} turns a round",
            "claim": f"a CLAIM and its round trip, with the bodies: median of {CLAIMS} in a round",
            "memory": "used_memory after filling less before, less the bytes of the bodies",
            "filling": "bodies were made before; ENQUEUE in batches of 500, one after the other",
        },
        conditions(server_version()) | {"AOF": "automatic rewrites off"},
    )


def _measure(backlog: Backlog) -> Measure:
    return Measure(backlog.turns_per_s(), statistics.median(backlog.claim_ms()))


async def _done(client: AsyncRedis) -> int:
    return int(await client.hget(Keys().run(RUN), "done") or 0)  # type: ignore[misc]


def _used_memory(client: redis.Redis) -> int:
    info: Any = client.info("memory")
    return int(info["used_memory"])
