"""Queues with their workers, each given the same kind of work, and how fast one of them is."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import redis
from pydantic_core import from_json

from benchmarks.conditions import versions_in
from benchmarks.environments import rival_python
from benchmarks.farm import (
    cpu_seconds,
    farm_environment,
    finish_times,
    process,
    server,
    socket_path,
    wait_for,
    worker_command,
)
from benchmarks.measure import rate
from benchmarks.turns import MODEL, RUN, asks, fill_now
from turnmill.embedded import EmbeddedServer
from turnmill.keys import Keys
from turnmill.settings import Farm

SLOTS = 200
WARM_UP = 0.2
"""Share of the turns that end before the rate is taken: by then all workers of a farm are at work."""

Say = Callable[[str], None]


class Contender(Protocol):
    """A queue that was filled with `turns` turns, and its workers."""

    turns: int

    def fill(self, on: EmbeddedServer) -> None: ...

    def work(self, on: EmbeddedServer, stack: ExitStack) -> subprocess.Popen[bytes]:
        """Start one worker process."""

    def ended(self, client: redis.Redis) -> int:
        """How many have ended by now."""

    def times(self, client: redis.Redis) -> list[float]:
        """When each ended, in seconds."""


@dataclass(frozen=True)
class Measure:
    """Turns a second; CPU for each turn in microseconds, of all workers and of the server."""

    rate: float
    worker_cpu: float
    server_cpu: float


def measure(contender: Contender, filled: Path, workers: int = 1) -> Measure:
    """Let workers empty a queue. `filled`: data of a server with a full queue."""
    wanted = contender.turns
    with server(filled) as on, redis.Redis.from_url(on.url) as client, ExitStack() as stack:
        started = [contender.work(on, stack) for _ in range(workers)]

        def so_far() -> tuple[int, float, float]:
            assert on.pid is not None
            cpu = sum(cpu_seconds(worker.pid) for worker in started)
            return contender.ended(client), cpu, cpu_seconds(on.pid)

        wait_for(lambda: contender.ended(client) > WARM_UP * wanted, *started, pause=0.01)
        before = so_far()
        wait_for(lambda: contender.ended(client) >= wanted, *started, pause=0.05)
        count, worker_cpu, server_cpu = (b - a for a, b in zip(before, so_far(), strict=True))
        times = sorted(contender.times(client))
        return Measure(
            rate(times[int(WARM_UP * len(times)) : int((1 - WARM_UP) * len(times))]),
            1e6 * worker_cpu / max(1, count),
            1e6 * server_cpu / max(1, count),
        )


class Turnmill:
    """Workers as users start them, with the scripted engine that answers at once."""

    def __init__(self, turns: int) -> None:
        self.turns = turns

    def fill(self, on: EmbeddedServer) -> None:
        fill_now(Farm(on.url), list(asks(0, self.turns)))

    def work(self, on: EmbeddedServer, stack: ExitStack) -> subprocess.Popen[bytes]:
        return stack.enter_context(process(worker_command(SLOTS), farm_environment(Farm(on.url))))

    def ended(self, client: redis.Redis) -> int:
        done: Any = client.hget(Keys().run(RUN), "done")
        return int(done or 0)

    def times(self, client: redis.Redis) -> list[float]:
        return finish_times(client, MODEL)


@dataclass(frozen=True)
class Kind:
    """A rival: what is installed for it, how many of its jobs have not ended, and where its results are:
    a pattern of keys, and the field of the stored JSON that has what the job returned. `at_once`: jobs at once."""

    requirements: tuple[str, ...]
    left: Callable[[Any], int]
    results: str
    field: str
    about: str
    at_once: int

    @property
    def packages(self) -> list[str]:
        return [
            requirement.partition("=")[0].partition("[")[0] for requirement in self.requirements
        ]


def _left_in_group(client: Any) -> int:
    group = client.xinfo_groups("bench")[0]
    return int(group["lag"]) + int(group["pending"])


KINDS = {
    "arq": Kind(
        ("arq==0.28.0", "redis[hiredis]==5.3.1", "uvloop==0.23.0"),
        lambda client: int(client.zcard("arq:queue")),
        "arq:result:*",
        "r",
        "max_jobs {}, poll_delay 0.01",
        20,
    ),
    "saq": Kind(
        (
            "saq==0.26.4",
            "redis[hiredis]==7.4.1",
            "typing_extensions==4.16.0",  # which saq needs and does not name
            "uvloop==0.23.0",
        ),
        lambda client: int(client.zcard("saq:bench:incomplete")),
        "saq:job:bench:*",
        "result",
        "concurrency {}",
        50,
    ),
    "streaq": Kind(
        ("streaq==7.2.0", "coredis==6.9.0", "uvloop==0.23.0"),
        lambda client: int(client.xlen("streaq:bench:queues:normal")),
        "streaq:bench:task:results:*",
        "r",
        "concurrency {}, as many prefetched",
        50,
    ),
    "taskiq": Kind(
        ("taskiq==0.13.0", "taskiq-redis==1.2.4", "redis[hiredis]==8.1.0", "uvloop==0.23.0"),
        _left_in_group,
        "result:*",
        "return_value",
        "streams with acknowledgement, max_async_tasks {}, as many prefetched",
        50,
    ),
}
"""`at_once`: what was fastest for no-ops by the median of all trials, on two noisy cores with Redis beside: 10, 20 and
50 were tried four or five times in turns, 100 and 200 once or twice. From 10 to 50 the medians differ by less than
one setting does from trial to trial, save for streaq; in no round was 100 or 200 the fastest."""


class Rival:
    """A stock worker of another queue, in an environment of its own: JSON, results stored, uvloop."""

    def __init__(self, name: str, turns: int, say: Say) -> None:
        self.turns, self._kind = turns, KINDS[name]
        self._python = rival_python(name, self._kind.requirements, say)
        self._script = [self._python, Path(__file__).parent / "rivals" / f"{name}_jobs.py"]

    @property
    def about(self) -> str:
        kind = self._kind
        return (
            f"{kind.about.format(kind.at_once)}, JSON, results stored; {self.turns:,} jobs of about 1 kB queued "
            f"before; {versions_in(self._python, kind.packages)}"
        )

    def fill(self, on: EmbeddedServer) -> None:
        command = [*self._script, "fill", socket_path(on), str(self.turns)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def work(self, on: EmbeddedServer, stack: ExitStack) -> subprocess.Popen[bytes]:
        command = [*self._script, "work", socket_path(on), str(self._kind.at_once)]
        return stack.enter_context(process(command))

    def ended(self, client: redis.Redis) -> int:
        return self.turns - self._kind.left(client)

    def times(self, client: redis.Redis) -> list[float]:
        keys = list(client.scan_iter(self._kind.results, count=1000))
        times = []
        for start in range(0, len(keys), 500):
            records: Any = client.mget(keys[start : start + 500])
            results = (from_json(record).get(self._kind.field) for record in records)
            times += [result["trace"]["times"]["finished"] for result in results if result]
        return times


def fill(contender: Contender, folder: Path) -> None:
    """Fill the queue of a server whose data stays in a folder."""
    with EmbeddedServer(folder) as on:
        contender.fill(on)
