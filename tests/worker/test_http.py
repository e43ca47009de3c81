"""What a worker says of itself over HTTP: real processes, real requests."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.processes import SimWorker, ValkeyServer, until, until_async

from turnmill.children import parent_death_signal
from turnmill.client import Client
from turnmill.errors import UsageError
from turnmill.reply import EngineIdentity
from turnmill.settings import Farm
from turnmill.store import WorkerInfo
from turnmill.turn import Turn
from turnmill_worker.counters import Counters, Vitals
from turnmill_worker.http import CONNECTIONS, SILENT_SECONDS, HttpServer

WorkerFactory = Callable[..., SimWorker]
LINE = (sys.executable, "-m", "turnmill_worker")
Labels = tuple[tuple[str, str], ...]

BLOCKING = """
import time
from turnmill_worker.cli import main
from turnmill_worker.engines.sim import SimEngine

async def block(self, turn, rid, progress):
    time.sleep(3600)

SimEngine.answer = block
main()
"""


def turn(content: str = "Hello", **fields: Any) -> Turn:
    messages = [{"role": "user", "content": content}]
    return Turn.model_validate({"model": "sim", "messages": messages, **fields})


@pytest.fixture
async def asking(farm: Farm) -> AsyncIterator[Client]:
    async with Client(farm.url, namespace=farm.namespace, run="run") as client:
        yield client


def port_of(log: Callable[[], str]) -> int:
    """Where it serves, once it has said so."""
    return int(until(lambda: re.search(r"http on \S+ port (\d+)", log()), "it serves")[1])


def get(port: int, path: str, method: str = "GET") -> tuple[int, str, str]:
    """Status, content type, body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.getheader("Content-Type", ""), response.read().decode()
    finally:
        connection.close()


def plain(port: int, path: str) -> tuple[int, str]:
    status, _, text = get(port, path)
    return status, text.strip()


# Prometheus' text format, read strictly

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
PAIR = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\n"])*)"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({PAIR}(?:,{PAIR})*)\}})? (-?[0-9.e+]+)")


def parse(text: str) -> dict[str, dict[Labels, float]]:
    """Families by name, each with its values by labels. Fails on what the format does not allow."""
    assert text.endswith("\n")
    lines, families = iter(text.splitlines()), dict[str, dict[Labels, float]]()
    family: dict[Labels, float] = {}
    name = kind = ""
    for line in lines:
        if line.startswith("#"):
            said = re.fullmatch(rf"# HELP ({NAME}) (\S.*)", line)
            assert said, line
            typed = re.fullmatch(rf"# TYPE ({NAME}) (counter|gauge)", next(lines))
            assert typed, line
            name, kind = typed.groups()
            assert said[1] == name
            assert name not in families, "a family is there once"
            assert name.endswith("_total") == (kind == "counter")
            family = families[name] = {}
            continue
        sample = SAMPLE.fullmatch(line)
        assert sample, line
        assert sample[1] == name, "samples stand below their family's head"
        labels = tuple(re.findall(PAIR, sample[2] or ""))
        assert labels not in family, line
        family[labels] = float(sample[len(sample.groups())])
    assert all(families.values()), "every family has a sample"
    return families


def metrics(port: int) -> dict[str, dict[Labels, float]]:
    status, kind, text = get(port, "/metrics")
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    return parse(text)


def value(port: int, name: str, **labels: str) -> float | None:
    family = metrics(port).get(f"turnmill_{name}", {})
    return next((n for found, n in family.items() if labels.items() <= dict(found).items()), None)


# A worker's life


async def test_it_counts_what_the_worker_does(worker: WorkerFactory, asking: Client) -> None:
    one = worker(
        "--http", "0", "--slots", "3", sim=("--reject-if", "wrong", "--answer-tokens", "4")
    )
    port = port_of(lambda: one.log)
    until(lambda: plain(port, "/ready") == (200, "ok"), "it is ready")
    assert plain(port, "/health") == (200, "ok")
    for asked in (turn("Hello"), turn("Bye", sampling={"max_tokens": 2}), turn("wrong")):
        await asking.ask(asked)
    found = metrics(port)
    outcomes = {
        dict(labels)["outcome"]: n for labels, n in found["turnmill_finished_total"].items()
    }
    assert outcomes == {"completed": 1, "capped": 1, "failed": 1, "requeued": 0, "cancelled": 0}
    assert found["turnmill_claimed_total"] == {(): 3}
    tokens = {dict(labels)["kind"]: n for labels, n in found["turnmill_tokens_total"].items()}
    assert tokens == {"prompt": 4, "completion": 6, "cached": 0}
    assert found["turnmill_slots"] == {(): 3}
    assert found["turnmill_ready"] == found["turnmill_redis_up"] == {(): 1}
    (named,) = found["turnmill_worker_info"]
    assert dict(named)["model"] == "sim"
    labels = {label for family in found.values() for pairs in family for label, _ in pairs}
    assert labels <= {"model", "engine", "version", "outcome", "kind", "state"}


async def test_it_shows_the_queue_and_what_runs(worker: WorkerFactory, asking: Client) -> None:
    one = worker("--http", "127.0.0.1:0", "--slots", "2", sim=("--hang-if", "turn"))
    port = port_of(lambda: one.log)
    await asking.submit_many([turn(f"turn {i}") for i in range(5)])
    until(lambda: value(port, "queue_turns", state="queued") == 3, "three turns wait")
    assert value(port, "queue_turns", state="running", model="sim") == 2
    assert value(port, "running_turns") == value(port, "engine_requests") == 2
    until(lambda: (value(port, "lease_renewals_total") or 0) >= 2, "leases are renewed")


async def test_a_turn_that_somebody_else_has_taken_is_counted_as_lost(
    worker: WorkerFactory, asking: Client
) -> None:
    first = worker("--http", "0", sim=("--hang-if", "Hello"))
    port = port_of(lambda: first.log)
    hash = await asking.submit(turn())
    until(lambda: value(port, "running_turns") == 1, "it runs")
    worker()
    first.signal(signal.SIGSTOP)
    await asking.wait(hash, 30)
    first.signal(signal.SIGCONT)
    until(lambda: value(port, "leases_lost_total") == 1, "it knows of its loss")
    until(lambda: value(port, "finished_total", outcome="requeued") == 1, "it has let go")


async def test_while_it_drains_it_is_healthy_and_not_ready(
    worker: WorkerFactory, asking: Client
) -> None:
    one = worker("--http", "0", "--drain", "1000", sim=("--hang-if", "Hello"))
    port = port_of(lambda: one.log)
    await asking.submit(turn())
    until(lambda: value(port, "running_turns") == 1, "it runs")
    one.signal(signal.SIGTERM)
    until(lambda: plain(port, "/ready") == (503, "draining"), "it drains")
    assert plain(port, "/health") == (200, "ok")
    one.signal(signal.SIGTERM)
    assert one.wait() == 0


def test_without_redis_it_is_healthy_and_not_ready(
    worker: WorkerFactory, own_valkey: Callable[..., ValkeyServer]
) -> None:
    server = own_valkey()
    one = worker("--http", "0", farm=Farm(server.url))
    port = port_of(lambda: one.log)
    until(lambda: value(port, "queue_turns", state="queued") == 0, "the queue is known")
    server.kill()
    until(lambda: plain(port, "/ready") == (503, "Redis is away"), "Redis is missed")
    assert plain(port, "/health") == (200, "ok")
    assert value(port, "redis_up") == 0
    until(lambda: value(port, "queue_turns") is None, "the queue is not known any more")
    server.start()
    until(lambda: plain(port, "/ready") == (200, "ok"), "Redis is back")


def test_it_answers_before_redis_does(worker: WorkerFactory, tmp_path: Path) -> None:
    # Nobody has watched the engine yet, so nobody may call it silent.
    away = Farm(f"unix://{tmp_path}/no")
    one = worker("--http", "0", "--stalled-after", "0.1", farm=away, registers=False)
    port = port_of(lambda: one.log)
    until(lambda: "waiting for Redis" in one.log)
    assert plain(port, "/ready") == (503, "Redis is away")
    assert plain(port, "/health") == (200, "ok")
    assert value(port, "engine_silent_seconds") == 0


@pytest.fixture
def blocking(farm: Farm, tmp_path: Path) -> Iterator[int]:
    """The port of a worker whose loop every turn blocks."""
    log = tmp_path / "blocking.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", BLOCKING, "--engine", "sim", "--http", "0"],
            env={**os.environ, "REDIS_URL": farm.url, "TURNMILL_NAMESPACE": farm.namespace},
            stdout=output,
            stderr=output,
            preexec_fn=parent_death_signal(),
        )
    yield port_of(log.read_text)
    process.kill()
    process.wait()


async def test_it_answers_while_the_workers_loop_is_blocked(blocking: int, asking: Client) -> None:
    await asking.submit(turn())

    async def leased() -> bool:
        return (await asking.queue.depth("sim")).running == 1

    await until_async(leased, "it has the turn")
    until(lambda: (value(blocking, "engine_silent_seconds") or 0) > 1.5, "its loop is blocked")
    assert plain(blocking, "/health") == (200, "ok")
    assert value(blocking, "claimed_total") == 1


# The address


@pytest.mark.parametrize("host", ["", "127.0.0.1:"])
def test_a_port_that_is_taken_ends_the_worker_before_it_loads_a_model(
    farm: Farm, host: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"{host}{taken.getsockname()[1]}"
        done = subprocess.run(
            [*LINE, "--engine", "local", "--model", "/none.gguf", "--http", address],
            env={**os.environ, "REDIS_URL": farm.url},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line == f"turnmill worker: --http {address}: Address already in use"


@pytest.mark.parametrize("address", ["x", "", "127.0.0.1", "1:x", "65536", "-1", ":", "\u0661"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="must be PORT or HOST:PORT"):
        HttpServer(address)


# The server alone, with a worker in a state that passes too quickly to be met


class Posing:
    """A worker that is as it is told to be."""

    def __init__(self, farm: Farm, **vitals: Any) -> None:
        self.farm, self.counters = farm, Counters()
        self.counters.registered = True
        engine = EngineIdentity(engine="none", version='1 "\\ \n', model="m")
        info = WorkerInfo(
            id="w", host="here", pid=1, model="m", engine=engine, slots=1, context=1, running=0,
            state="serving", started=0, heartbeat=0,
        )  # fmt: skip
        self._vitals = Vitals([info], **{"in_engine": 0, "unstored": 0, "silent": 0.0, **vitals})

    def vitals(self) -> Vitals:
        return self._vitals


@pytest.fixture
def serving(farm: Farm) -> Iterator[Callable[..., int]]:
    """Starts servers, and returns their ports."""
    servers: list[HttpServer] = []

    def start(**vitals: Any) -> int:
        servers.append(HttpServer("0"))
        if vitals:
            servers[-1].watch(Posing(farm, **vitals))
        return servers[-1].port

    yield start
    for server in servers:
        server.close()


def test_while_the_engine_starts_it_is_healthy_and_not_ready(serving: Callable[..., int]) -> None:
    port = serving()
    assert plain(port, "/health") == (200, "ok")
    assert plain(port, "/ready") == (503, "the engine is starting")
    assert metrics(port) == {"turnmill_ready": {(): 0}}


def test_a_dead_engine_is_neither_healthy_nor_ready(serving: Callable[..., int]) -> None:
    port = serving(ending="the engine died: out of memory")
    for path in ("/health", "/ready"):
        assert plain(port, path) == (503, "the engine died: out of memory")
    assert value(port, "ready") == 0


def test_a_silent_engine_is_healthy_until_it_is_given_up(serving: Callable[..., int]) -> None:
    port = serving(silent=SILENT_SECONDS + 1)
    assert plain(port, "/health") == (200, "ok")
    assert plain(port, "/ready") == (503, "the engine was not seen alive for 13 s")


def test_what_stands_in_labels_cannot_break_the_format(serving: Callable[..., int]) -> None:
    (labels,) = metrics(serving(unstored=7))["turnmill_worker_info"]
    assert dict(labels)["version"] == '1 \\"\\\\ \\n'


def test_other_paths_and_methods(serving: Callable[..., int]) -> None:
    port = serving()
    assert get(port, "/")[0] == 404
    assert get(port, "/health?verbose=1")[0] == 200
    assert get(port, "/health", "HEAD") == (200, "text/plain; charset=utf-8", "")
    assert get(port, "/health", "POST")[0] == 501


def test_idle_connections_take_up_a_bounded_number_of_threads(serving: Callable[..., int]) -> None:
    port = serving()
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS)]
    try:
        # One more is refused, and served again when another has gone.
        with socket.create_connection(("127.0.0.1", port), timeout=10) as refused:
            assert refused.recv(1) == b""
        idle.pop().close()
        until(lambda: served(port), "there is room again")
    finally:
        for connection in idle:
            connection.close()


def served(port: int) -> bool:
    try:
        return plain(port, "/health") == (200, "ok")
    except (OSError, http.client.HTTPException):
        return False
