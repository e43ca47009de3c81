"""Fixtures as factories. One real Valkey serves all the tests; each test has a namespace of its own."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import redis
from redis.asyncio import Redis
from tests.by_hand import ByHand
from tests.processes import SimWorker, ValkeyServer, until

from turnmill.settings import Farm

# The same examples every time, on machines of any speed.
hypothesis.settings.register_profile(
    "turnmill", deadline=None, derandomize=True, max_examples=50, database=None
)
hypothesis.settings.load_profile("turnmill")


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    """The server that tests share. Who wants to kill or configure one takes `own_valkey`."""
    server = ValkeyServer().start()
    yield server
    server.close()


@pytest.fixture
def own_valkey() -> Iterator[Callable[..., ValkeyServer]]:
    """Starts servers for this test alone: `own_valkey(maxmemory="8mb")`."""
    servers: list[ValkeyServer] = []

    def start(**options: str) -> ValkeyServer:
        servers.append(ValkeyServer(**options))
        return servers[-1].start()

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def farm(valkey: ValkeyServer) -> Farm:
    return Farm(valkey.url, f"t{uuid.uuid4().hex[:12]}")


@pytest.fixture
async def client(farm: Farm) -> AsyncIterator[Redis]:
    """A plain connection to the farm's server."""
    connection = farm.connect()
    yield connection
    await connection.aclose(close_connection_pool=True)


@pytest.fixture
def by_hand(client: Redis, farm: Farm) -> ByHand:
    return ByHand(client, farm)


@pytest.fixture
def worker(farm: Farm, tmp_path: Path) -> Iterator[Callable[..., SimWorker]]:
    """Starts workers with the scripted engine, and returns when they have registered:
    `worker("--slots", "2", sim=("--latency", "0.1"))`. Their lease is a second unless given."""
    workers: list[SimWorker] = []

    def start(
        *options: str,
        sim: tuple[str, ...] = (),
        farm: Farm = farm,
        lease: float = 1.0,
        registers: bool = True,
    ) -> SimWorker:
        log = tmp_path / f"worker-{len(workers)}.log"
        one = SimWorker(farm, log, ("--lease", str(lease), *options), sim)
        workers.append(one)
        if registers:
            until(lambda: registered(farm, one), "the worker has registered")
        return one

    yield start
    for one in workers:
        one.kill()


def registered(farm: Farm, worker: SimWorker) -> bool:
    assert worker.process.poll() is None, worker.log
    with redis.Redis.from_url(farm.url) as connection:
        ids = [raw.decode() for raw in connection.smembers(farm.keys.workers)]
        records = [connection.get(farm.keys.worker(id)) for id in ids]
    return any(b'"pid":%d,' % worker.pid in (record or b"") for record in records)
