"""A load like that of many people: bursts, long tails, and clients that hang up. All others are answered once, and nothing
is left behind."""

from __future__ import annotations

import asyncio
import re
import resource
from collections.abc import Callable

import psutil
from benchmarks.load import ANSWER, Request, play, requests
from benchmarks.trace import generated
from redis.asyncio import Redis
from tests.gateway.serving import Asking, GatewayProcess, half_a_minute_later
from tests.processes import SimWorker, until, until_async

from turnmill.gateway.server import bind, serving, url_of
from turnmill.gateway.settings import GatewaySettings
from turnmill.queue import Depth, Queue
from turnmill.settings import Farm
from turnmill.store import RunInfo, Store
from turnmill_worker.audit import Audit, audit

Serve = Callable[..., GatewayProcess]
MakeAsking = Callable[..., Asking]
WorkerFactory = Callable[..., SimWorker]

SEED = 20
COUNT, SECONDS, LONGEST = 240, 10.0, 600
ENDLESS = 30_000
"""Tokens of an answer that nobody reads to its end."""
SIM = (*ANSWER, "--latency", "0.05", "--tokens-per-second", "200", "--context", str(2 * ENDLESS))
SLOTS = ("--slots", "256")
EMPTY = Depth(queued=0, running=0, due=0, suspects=0)


async def counters(store: Store) -> dict[str, RunInfo]:
    return {info.name: info for info in await store.runs()}


async def empty(client: Redis, farm: Farm) -> bool:
    return await Queue(client, farm.keys).depth("sim") == EMPTY


async def names(client: Redis, pattern: str) -> list[str]:
    return [raw.decode() async for raw in client.scan_iter(pattern, count=1000)]


async def metric(gateway: Asking, name: str) -> int:
    text = (await gateway.http.get("/metrics")).text
    found = re.search(rf"^turnmill_gateway_{name} (\d+)$", text, re.MULTILINE)
    assert found
    return int(found[1])


def open_sockets(gateway: GatewayProcess) -> int:
    """Connections of clients that it has not closed."""
    sockets = psutil.Process(gateway.process.pid).net_connections("inet")
    return sum(socket.status != psutil.CONN_LISTEN for socket in sockets)


async def test_a_load_at_its_own_pace_and_at_four_times(
    serve: Serve, worker: WorkerFactory, client: Redis, farm: Farm, asking: MakeAsking
) -> None:
    workers = [worker(*SLOTS, lease=10, sim=SIM) for _ in range(2)]
    gateways = [serve("--insecure") for _ in range(2)]
    trace = generated(SEED, COUNT, SECONDS, longest=LONGEST)
    store = Store(client, farm.keys)
    asked: list[Request] = []
    for pace in (1, 4):
        load = requests(trace, SEED, f"load-{pace}", abandoned=ENDLESS)
        outcomes = await play([gateway.url for gateway in gateways], load, pace)
        assert [one for one in outcomes if one.problem] == []
        assert [one.hung_up for one in outcomes] == [one.hangs_up for one in load]
        asked += load

    # Outside a run, who has hung up is not answered.
    abandoned = sum(one.hangs_up and one.outside for one in asked)
    assert abandoned >= 5
    looking = [asking(gateway.url) for gateway in gateways]

    async def noticed() -> bool:
        held = await client.zcard(farm.keys.held("sim"))
        waited_for = [await metric(gateway, "requests_under_way") for gateway in looking]
        return held == abandoned and waited_for == [1, 1]  # for these figures

    await until_async(noticed, "nobody waits any more, and what was abandoned is still held")
    held = await client.zrange(farm.keys.held("sim"), 0, -1)
    await half_a_minute_later(client, farm, held)
    await until_async(lambda: empty(client, farm), "the queue is empty, and nothing runs")
    assert await client.exists(farm.keys.held("sim")) == 0

    # All others are, each once, and at the first try.
    answered = len(asked) - abandoned
    runs = await counters(store)
    outside = sum(one.outside for one in asked)
    assert set(runs) == {"adhoc", "load-1", "load-4"}
    assert (runs["adhoc"].total, runs["adhoc"].cancelled) == (outside, abandoned)
    assert sum(info.total for info in runs.values()) == len(asked)
    assert sum(info.done for info in runs.values()) == answered
    prefix = farm.keys.reply("")
    hashes = [name.removeprefix(prefix) for name in await names(client, f"{prefix}*")]
    assert len(hashes) == answered
    turns = [turn for hash in hashes if (turn := await store.turn(hash))]
    assert len(turns) == answered
    assert await audit(client, farm.keys, turns, "adhoc") == Audit(0, 0, 0, 0)
    traces = [await store.trace(hash) for hash in hashes]
    assert [trace for trace in traces if trace is None or trace.earlier] == []
    assert len({trace.worker for trace in traces if trace}) == len(workers)

    # And nothing is left.
    for left in (farm.keys.open_draws("*", "*"), farm.keys.tries("*"), farm.keys.partial("*")):
        assert await names(client, left) == []
    hung_up = sum([await metric(gateway, "hang_ups_total") for gateway in looking])
    assert abandoned <= hung_up <= sum(one.hangs_up for one in asked)
    for one in looking:
        await one.http.aclose()
    until(lambda: sum(map(open_sockets, gateways)) == 0, "no connection is open")
    assert [one.log for one in workers if "Traceback" in one.log] == []


async def test_clients_that_hang_up_leave_nothing_behind(
    worker: WorkerFactory, client: Redis, farm: Farm
) -> None:
    worker(*SLOTS, sim=SIM)
    load = [
        Request(0.0, path, f"abandoned {number}", ENDLESS, stream=True, hangs_up=True)
        for number in range(20)
        for path in ("/v1", "/runs/run/v1")
    ]
    bound = bind("127.0.0.1", 0, insecure=True)
    settings = GatewaySettings(farm, insecure=True, orphan=1.5)
    async with serving(settings, bound, drain=1):
        await play([url_of(bound)], load[:2], 1)  # its connections are made
        before, files = len(asyncio.all_tasks()), psutil.Process().num_fds()
        outcomes = await play([url_of(bound)], load[2:], 1)
        assert all(one.hung_up for one in outcomes)

        async def outside_cancelled() -> bool:
            running = (await Queue(client, farm.keys).depth("sim")).running
            return running == len(load) // 2

        await until_async(outside_cancelled, "what was asked outside the run is cancelled")

        async def settled() -> bool:
            return len(asyncio.all_tasks()) <= before

        await until_async(settled, "no task is left, though the run's turns go on")
        assert psutil.Process().num_fds() < files + len(load) // 2, "connections are kept, not lost"
    runs = await counters(Store(client, farm.keys))
    assert (runs["adhoc"].open, runs["adhoc"].cancelled) == (0, len(load) // 2)
    assert (runs["run"].open, runs["run"].cancelled) == (len(load) // 2, 0)


def test_as_many_clients_may_wait_as_the_system_allows(serve: Serve) -> None:
    limit = resource.RLIMIT_NOFILE
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (256, hard))  # as a shell has it, or worse
    try:
        gateway = serve("--insecure")
    finally:
        resource.setrlimit(limit, (soft, hard))
    allowed, _ = resource.prlimit(gateway.process.pid, limit)
    assert allowed > 256
