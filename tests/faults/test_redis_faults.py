"""Redis goes away, stops, forgets, is full, or is another one: turns, replies and leases outlive it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.faults.aftermath import HASHING, Asked, all_is_well, traces, turns
from tests.faults.proxy import Forwarder
from tests.processes import SimWorker, ValkeyServer, until, until_async

from turnmill.client import Client
from turnmill.settings import Farm

WorkerFactory = Callable[..., SimWorker]
ServerFactory = Callable[..., ValkeyServer]

pytestmark = pytest.mark.faults


@pytest.fixture
async def ask() -> AsyncIterator[Callable[..., Client]]:
    """Clients as `turnmill run` has them: they wait for Redis as long as it takes."""
    async with contextlib.AsyncExitStack() as stack:
        clients: list[Client] = []

        def start(farm: Farm) -> Client:
            client = Client(
                farm.url, namespace=farm.namespace, run="run", patience=None, poll_seconds=0.5
            )
            stack.push_async_callback(client.close)
            clients.append(client)
            return client

        yield start


async def running(client: Client, count: int) -> None:
    async def reached() -> bool:
        return (await client.queue.depth("sim")).running == count

    await until_async(reached, f"{count} turns run")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_a_server_that_ends_under_load_and_comes_back(
    how: signal.Signals, worker: WorkerFactory, own_valkey: ServerFactory, ask: Any
) -> None:
    server = own_valkey()
    farm = Farm(server.url)
    workers = [
        worker("--slots", "50", sim=("--latency", "0.1", *HASHING), farm=farm) for _ in range(2)
    ]
    client = ask(farm)
    asked = Asked(client, turns(2500))
    for share in (300, 900, 1500):
        await asked.until_ended(share)
        server.signal(how)
        server.wait()
        server.start()
    await asked.end_right()
    await all_is_well(client, asked.turns)
    assert [one.process.poll() for one in workers] == [None, None]


async def test_a_server_stopped_for_30_s_under_a_lease_of_10_s_costs_nobody_anything(
    worker: WorkerFactory, own_valkey: ServerFactory, ask: Any
) -> None:
    server = own_valkey()
    farm = Farm(server.url)
    # Half of the turns end while it is stopped, and their answers wait; half go on until it is back.
    for latency in ("15", "33"):
        sim = ("--latency", latency, *HASHING)
        worker("--slots", "20", sim=sim, farm=farm, lease=10.0)
    client = ask(farm)
    asked = Asked(client, turns(40))
    await running(client, 40)
    worker("--slots", "40", sim=HASHING, farm=farm, lease=10.0)  # it would take what lapses
    server.signal(signal.SIGSTOP)
    stopped = time.monotonic()
    await asyncio.sleep(30)  # the fault itself
    assert time.monotonic() - stopped >= 30
    server.signal(signal.SIGCONT)
    await asked.end_right()
    await all_is_well(client, asked.turns, tries=())


@contextlib.contextmanager
def storm(server: ValkeyServer) -> Iterator[list[int]]:
    """Every 50 ms all connections are killed and all scripts forgotten. Yields how many each gust killed."""
    gusts: list[int] = []
    over = threading.Event()

    def blow() -> None:
        with redis.Redis.from_url(server.url) as wind:
            while not over.wait(0.05):
                gusts.append(wind.client_kill_filter(_type="normal", skipme=True))
                wind.script_flush()

    thread = threading.Thread(target=blow)
    thread.start()
    try:
        yield gusts
    finally:
        over.set()
        thread.join()


async def test_a_storm_of_killed_connections_and_forgotten_scripts(
    worker: WorkerFactory, own_valkey: ServerFactory, ask: Any
) -> None:
    server = own_valkey()
    farm = Farm(server.url)
    # A claim whose answer is lost is renewed by nobody until it is cleared up, which takes several tries here.
    sim = ("--latency", "0.05", *HASHING)
    workers = [worker("--slots", "500", sim=sim, farm=farm, lease=5.0) for _ in range(2)]
    client = ask(farm)
    with storm(server) as gusts:
        asked = Asked(client, turns(20_000))
        await asked.end_right(100)
    assert sum(killed > 1 for killed in gusts) > 50
    await all_is_well(client, asked.turns)
    assert [one.process.poll() for one in workers] == [None, None]


async def test_at_full_memory_workers_begin_hold_their_leases_and_drain_the_queue(
    worker: WorkerFactory, own_valkey: ServerFactory, ask: Any
) -> None:
    server = own_valkey()
    farm = Farm(server.url)
    sim = ("--latency", "2", *HASHING)  # longer than a lease
    worker("--slots", "20", sim=sim, farm=farm)
    client = ask(farm)
    asked = Asked(client, turns(80))
    await running(client, 20)
    await client.store.redis.config_set("maxmemory", 1)
    worker("--slots", "20", sim=sim, farm=farm)
    await asked.end_right()
    await all_is_well(client, asked.turns, tries=())
    assert len({trace.worker for trace in await traces(client, asked.turns)}) == 2


async def test_a_producer_says_once_that_memory_is_full_and_goes_on_when_there_is_room(
    worker: WorkerFactory,
    own_valkey: ServerFactory,
    ask: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = own_valkey()
    farm = Farm(server.url)
    worker("--slots", "20", sim=("--latency", "0.1", *HASHING), farm=farm)
    client = ask(farm)
    first = Asked(client, turns(200, "before"))
    await first.until_ended(20)
    used = (await client.store.redis.info("memory"))["used_memory"]
    await client.store.redis.config_set("maxmemory", used)
    second = Asked(client, turns(200, "after"))
    await first.end_right()  # what is queued ends all the same
    await until_async(lambda: _holds("short of memory" in caplog.text))
    assert second.ended == 0
    await client.store.redis.config_set("maxmemory", 100 * used)
    await second.end_right()
    said = [record.getMessage() for record in caplog.records if record.name == "turnmill.redis"]
    assert [text.split(";")[0] for text in said] == [
        "Redis is short of memory for more turns",
        said[-1],
    ]
    assert said[-1].startswith("Redis is back")
    await all_is_well(client, [*first.turns, *second.turns], tries=())


async def _holds(state: bool) -> bool:
    return state


async def test_a_failover_that_loses_acknowledged_writes(
    worker: WorkerFactory, own_valkey: ServerFactory, ask: Any
) -> None:
    master, replica = own_valkey(), own_valkey()
    with Forwarder(master.socket) as front, Forwarder(master.socket) as link:
        promoting = redis.Redis.from_url(replica.url)
        promoting.replicaof("127.0.0.1", link.port)
        until(lambda: promoting.info("replication")["master_link_status"] == "up")
        farm = Farm(front.url)
        one = worker("--slots", "50", sim=("--latency", "0.2", *HASHING), farm=farm)
        client = ask(farm)
        early = Asked(client, turns(400, "early"))
        await early.until_ended(100)
        link.switch(None)  # what the master acknowledges from now on is lost
        late = Asked(client, turns(400, "late"))
        await late.until_ended(100)
        master.kill()
        front.switch(replica.socket)
        await until_async(lambda: _holds("read only replica" in one.log), "the replica refuses")
        with redis.Redis.from_url(replica.url) as kept:
            assert kept.hget(farm.keys.run("run"), "total") == b"400"
            known = [kept.exists(farm.keys.reply(turn.hash)) for turn in early.turns]
        assert sum(known) < early.ended
        promoting.replicaof("NO", "ONE")
        await early.end_right()
        await late.end_right()
        # Whose answer was lost after it had been told is not asked again, unless somebody asks again, as the
        # next attempt of a run does.
        assert len(await traces(client, late.turns)) < 400
        again = ask(farm)
        for asked in (early.turns, late.turns):
            await Asked(again, asked).end_right()
        await all_is_well(again, [*early.turns, *late.turns], tries=("handback", "lapse"))
        assert one.process.poll() is None


@pytest.mark.parametrize(
    ("command", "code"),
    [(("worker", "--engine", "sim"), 2), (("run", "in.jsonl", "--run", "r"), 3)],
    ids=["worker", "run"],
)
@pytest.mark.parametrize("password", ["", "guess"])
def test_a_wrong_password_is_said_in_one_line(
    command: tuple[str, ...],
    code: int,
    password: str,
    own_valkey: ServerFactory,
    tmp_path: Path,
) -> None:
    server = own_valkey(requirepass="secret")
    (tmp_path / "in.jsonl").write_text('{"id": "c", "turns": ["Hello"]}\n')
    url = f"{server.url}?password={password}" if password else server.url
    done = subprocess.run(
        [sys.executable, "-m", "turnmill", *command],
        cwd=tmp_path,
        env={**os.environ, "REDIS_URL": url},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("turnmill")]
    assert "invalid username-password pair" in said or "Authentication required" in said
    assert "Traceback" not in done.stderr
    assert "guess" not in done.stderr
