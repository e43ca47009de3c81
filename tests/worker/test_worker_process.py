"""Real worker processes: stopped, killed, and outlived by their turns."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.processes import SimWorker, ValkeyServer, until, until_async

from turnmill.client import Client
from turnmill.reply import Reply, Trace
from turnmill.settings import Farm
from turnmill.turn import Turn

WorkerFactory = Callable[..., SimWorker]

pytestmark = pytest.mark.faults


def turn(content: str = "Hello", **fields: Any) -> Turn:
    messages = [{"role": "user", "content": content}]
    return Turn.model_validate({"model": "sim", "messages": messages, **fields})


@pytest.fixture
async def asking(farm: Farm) -> AsyncIterator[Client]:
    async with Client(farm.url, namespace=farm.namespace, run="run") as client:
        yield client


async def running(asking: Client, count: int) -> None:
    async def reached() -> bool:
        return (await asking.queue.depth("sim")).running == count

    await until_async(reached, f"{count} turns run")


async def workers(asking: Client, count: int) -> None:
    async def reached() -> bool:
        return len(await asking.store.workers()) == count

    await until_async(reached, f"{count} workers are registered")


async def trace(asking: Client, hash: str) -> Trace:
    found = await asking.trace(hash)
    assert found is not None
    return found


async def test_it_registers_serves_and_drains(worker: WorkerFactory, asking: Client) -> None:
    one = worker(
        "--served-name", "sim", "--slots", "3", "--revision", "r1", sim=("--context", "99")
    )
    (info,) = await asking.store.workers()
    assert (info.pid, info.model, info.slots, info.context) == (one.pid, "sim", 3, 99)
    assert (info.engine.engine, info.revision, info.state) == ("sim", "r1", "serving")
    reply = await asking.ask(turn())
    assert isinstance(reply, Reply)
    assert reply.message.content == "Hello"
    assert (await trace(asking, turn().hash)).worker == info.id
    one.signal(signal.SIGTERM)
    assert one.wait() == 0
    assert await asking.store.workers() == []


async def test_on_sigterm_running_turns_end_and_no_new_ones_begin(
    worker: WorkerFactory, asking: Client
) -> None:
    one = worker("--slots", "2", sim=("--latency", "0.7"))
    hashes = await asking.submit_many([turn(f"{i}") for i in range(4)])
    await running(asking, 2)
    one.signal(signal.SIGTERM)
    assert one.wait() == 0
    assert sum([await asking.reply(hash) is not None for hash in hashes]) == 2
    depth = await asking.queue.depth("sim")
    assert (depth.queued, depth.running) == (2, 0)


async def test_what_does_not_end_in_time_goes_to_another_without_a_strike(
    worker: WorkerFactory, asking: Client
) -> None:
    first = worker("--drain", "0", sim=("--hang-if", "Hello"))
    hash = await asking.submit(turn())
    await running(asking, 1)
    first.signal(signal.SIGTERM)
    assert first.wait() == 0
    worker()
    assert isinstance(await asking.wait(hash, 30), Reply)
    (earlier,) = (await trace(asking, hash)).earlier
    assert earlier.outcome == "drain"


async def test_a_second_sigterm_does_not_wait(worker: WorkerFactory, asking: Client) -> None:
    one = worker("--drain", "1000", sim=("--hang-if", "Hello"))
    await asking.submit(turn())
    await running(asking, 1)
    one.signal(signal.SIGTERM)
    await until_async(lambda: _states(asking, "draining"))
    one.signal(signal.SIGTERM)
    assert one.wait() == 0
    depth = await asking.queue.depth("sim")
    assert (depth.queued, depth.running) == (1, 0)


async def _states(asking: Client, state: str) -> bool:
    return [info.state for info in await asking.store.workers()] == [state]


async def test_the_turns_of_a_killed_worker_are_answered_by_another(
    worker: WorkerFactory, asking: Client
) -> None:
    first = worker("--slots", "4", sim=("--hang-if", "turn"))
    hashes = await asking.submit_many([turn(f"turn {i}") for i in range(4)])
    await running(asking, 4)
    second = worker("--slots", "4")
    first.kill()
    endings = await asking.wait_many(hashes, 30)
    assert all(isinstance(ending, Reply) for ending in endings.values())
    found = await trace(asking, hashes[0])
    assert [one.outcome for one in found.earlier] == ["lapse"]
    assert found.worker != found.earlier[0].worker
    assert second.process.poll() is None


async def test_when_its_engine_dies_it_ends_with_70_and_its_turns_go_elsewhere(
    worker: WorkerFactory, asking: Client
) -> None:
    first = worker(sim=("--die-if", "death", "--hang-if", "innocent"))
    innocent = await asking.submit(turn("innocent"))
    await running(asking, 1)
    guilty = await asking.submit(turn("death"))
    assert first.wait() == 70
    assert "the engine was told to die" in first.log
    worker()
    endings = await asking.wait_many([innocent, guilty], 30)
    assert all(isinstance(ending, Reply) for ending in endings.values())
    for hash in (innocent, guilty):
        assert [one.outcome for one in (await trace(asking, hash)).earlier] == ["death"]


async def test_a_turn_that_kills_every_worker_ends_as_poison(
    worker: WorkerFactory, asking: Client
) -> None:
    pending = await asking.submit(turn("death"))
    for _ in range(5):
        assert worker(sim=("--die-if", "death"), registers=False).wait() == 70
    ending = await asking.wait(pending, 30)
    assert not isinstance(ending, Reply)
    assert (ending.kind, ending.tries) == ("poison", 5)


async def test_a_stopped_process_that_wakes_up_again_has_lost_its_turn(
    worker: WorkerFactory, asking: Client
) -> None:
    first = worker(sim=("--latency", "2"))
    hash = await asking.submit(turn())
    await running(asking, 1)
    second = worker()
    first.signal(signal.SIGSTOP)
    reply = await asking.wait(hash, 30)
    assert isinstance(reply, Reply)
    winner = (await trace(asking, hash)).worker
    first.signal(signal.SIGCONT)
    await workers(asking, 2)
    # It goes on serving, and what it made of the turn changes nothing.
    second.kill()
    assert isinstance(await asking.ask(turn("another")), Reply)
    assert (await trace(asking, hash)).worker == winner
    assert await asking.reply(hash) == reply


async def test_a_cancelled_turn_leaves_the_engine(worker: WorkerFactory, asking: Client) -> None:
    worker("--slots", "1", sim=("--hang-if", "slow"))
    slow = await asking.submit(turn("slow"))
    await running(asking, 1)
    assert await asking.cancel([slow]) == 1
    assert isinstance(await asking.ask(turn("quick")), Reply)


async def test_it_outlives_redis(
    worker: WorkerFactory, own_valkey: Callable[..., ValkeyServer]
) -> None:
    server = own_valkey(appendfsync="always")
    farm = Farm(server.url)
    one = worker("--slots", "8", sim=("--latency", "0.5"), farm=farm)
    async with Client(server.url, run="run", poll_seconds=0.3) as asking:
        hashes = await asking.submit_many([turn(f"{i}") for i in range(8)])
        await running(asking, 8)
        server.kill()
        await asking.store.redis.connection_pool.disconnect()
        until(lambda: "leases cannot be renewed now" in one.log)
        server.start()
        endings = await asking.wait_many(hashes, 30)
        assert all(isinstance(ending, Reply) for ending in endings.values())
        assert isinstance(await asking.ask(turn("later")), Reply)
    assert one.process.poll() is None


async def test_a_storm_of_killed_connections_and_lost_scripts_costs_no_turn(
    worker: WorkerFactory, own_valkey: Callable[..., ValkeyServer]
) -> None:
    server = own_valkey()
    farm = Farm(server.url)
    one = worker("--slots", "50", sim=("--latency", "0.02"), farm=farm, lease=5.0)
    gusts = 0
    async with Client(server.url, run="run", poll_seconds=0.5) as asking, farm.connect() as storm:
        waiting = asyncio.gather(*(asking.ask(turn(f"{i}")) for i in range(1000)))
        done = 0

        async def more_is_done() -> bool:
            return int(await storm.hget(farm.keys.run("run"), "done") or 0) > done

        while done < 1000:
            await storm.client_kill_filter(_type="normal", skipme=True)
            await storm.script_flush()
            await until_async(more_is_done)
            done = int(await storm.hget(farm.keys.run("run"), "done"))
            gusts += 1
        assert gusts > 5
        endings = await waiting
        assert all(isinstance(ending, Reply) for ending in endings)
        traces = [await trace(asking, ending.hash) for ending in endings]
        outcomes = {earlier.outcome for found in traces for earlier in found.earlier}
        assert outcomes <= {"handback"}
        depth = await asking.queue.depth("sim")
        assert (depth.queued, depth.running, depth.due, depth.suspects) == (0, 0, 0, 0)
    assert one.process.poll() is None


async def test_it_waits_for_a_redis_that_is_not_there_yet(
    worker: WorkerFactory, tmp_path: Path
) -> None:
    one = worker(farm=Farm(f"unix://{tmp_path}/no"), registers=False)
    until(lambda: "waiting for Redis" in one.log)
    one.signal(signal.SIGTERM)
    assert one.wait() == 0


async def test_the_first_worker_sets_the_lease_of_the_farm(
    worker: WorkerFactory, asking: Client, farm: Farm
) -> None:
    worker(lease=2.0)
    second = worker(lease=3.0)
    assert await asking.store.redis.get(farm.keys.lease) == b"2000"
    assert "the farm's lease is 2 s" in second.log


def ends(farm: Farm | None, *arguments: str) -> tuple[int, list[str]]:
    """Runs a worker that cannot begin; returns its exit code and what it says."""
    environment = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    if farm is not None:
        environment |= {"REDIS_URL": farm.url, "TURNMILL_NAMESPACE": farm.namespace}
    done = subprocess.run(
        [sys.executable, "-m", "turnmill_worker", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stderr.strip().splitlines()


def test_without_a_redis_it_says_so_in_one_line() -> None:
    code, said = ends(None, "--engine", "sim")
    assert code == 2
    assert said == ["turnmill worker: no Redis: set REDIS_URL, for example redis://127.0.0.1:6379"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--engine", "sim", "--lease", "0"), "lease: must be a number above 0"),
        (("--engine", "sim", "--namespace", "a b"), "namespace 'a b'"),
        (("--engine", "sim", "--redis-url", "localhost:6379"), "REDIS_URL"),
        (("--engine", "sim", "--", "--latencyy", "1"), "--latencyy"),
    ],
)
def test_a_wrong_configuration_ends_with_2_and_one_line(
    farm: Farm, arguments: tuple[str, ...], said: str
) -> None:
    code, lines = ends(farm, *arguments)
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith("turnmill worker: ")
    assert said in lines[0]


def test_a_wrong_password_ends_with_2_and_says_so(own_valkey: Callable[..., ValkeyServer]) -> None:
    server = own_valkey(requirepass="secret")
    code, lines = ends(Farm(f"{server.url}?password=guess"), "--engine", "sim")
    assert code == 2
    assert "invalid username-password pair" in lines[-1]
    assert not any("Traceback" in line for line in lines)


async def test_a_claim_that_cannot_be_read_ends_the_worker_instead_of_hanging_it(
    worker: WorkerFactory, asking: Client, farm: Farm
) -> None:
    hash = await asking.submit(turn())
    waiters = f"{farm.keys.prefix}w:{hash}"
    await asking.store.redis.hset(waiters, "run", "5 o'clock")
    one = worker("--lease", "60", registers=False)
    assert await asyncio.to_thread(one.wait) == 70
    assert "a background task died" in one.log
    # What it had claimed went back before it ended.
    depth = await asking.queue.depth("sim")
    assert (depth.running, depth.queued) == (0, 1)


async def test_answers_are_kept_while_redis_refuses_the_worker(
    worker: WorkerFactory, own_valkey: Callable[..., ValkeyServer]
) -> None:
    farm = Farm(own_valkey().url)
    async with Client(farm.url, run="run") as asking:
        one = worker("--slots", "4", "--lease", "30", sim=("--latency", "0.5"), farm=farm)
        hashes = await asking.submit_many([turn(f"{i}") for i in range(4)])
        await running(asking, 4)
        await asking.store.redis.acl_setuser("default", enabled=True, commands=["-evalsha"])
        await asyncio.to_thread(until, lambda: "Redis refuses" in one.log, "it is refused")
        await asking.store.redis.acl_setuser("default", enabled=True, commands=["+evalsha"])
        endings = await asking.wait_many(hashes, 30)
        assert all(isinstance(ending, Reply) for ending in endings.values())
        assert [(await trace(asking, hash)).earlier for hash in hashes] == [[]] * 4


def test_told_to_end_it_ends_although_redis_is_away(
    own_valkey: Callable[..., ValkeyServer], worker: Callable[..., SimWorker]
) -> None:
    server = own_valkey()
    one = worker(farm=Farm(server.url))
    server.kill()
    until(lambda: "leases cannot be renewed now" in one.log, "it misses Redis")
    one.signal(signal.SIGTERM)
    assert one.wait(10) == 0


async def test_with_answers_in_hand_it_waits_for_redis_until_it_is_told_twice(
    own_valkey: Callable[..., ValkeyServer], worker: Callable[..., SimWorker]
) -> None:
    server = own_valkey()
    farm = Farm(server.url)
    one = worker("--drain", "30", farm=farm, sim=("--latency", "2"))
    async with Client(farm.url, patience=1) as client:
        turn = Turn.model_validate({"model": "sim", "messages": [{"role": "user", "content": "x"}]})
        await client.submit(turn)

        async def running() -> bool:
            return (await client.queue.depth("sim")).running == 1

        await until_async(running, "the turn runs")
        server.kill()
    one.signal(signal.SIGTERM)
    until(lambda: "draining" in one.log, "it has heard")
    with pytest.raises(subprocess.TimeoutExpired):
        one.wait(4)  # the answer is in hand by then
    one.signal(signal.SIGTERM)
    assert one.wait(10) == 0
    assert "answers lost with us: 1" in one.log
