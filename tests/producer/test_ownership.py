"""A run has one producer."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis
from tests.processes import until_async

from turnmill import ownership
from turnmill.errors import RunInUse
from turnmill.ownership import sole_producer
from turnmill.settings import Farm

HOLDER = """
import asyncio, sys
from turnmill.ownership import sole_producer
from turnmill.settings import Farm

async def hold():
    redis = Farm(sys.argv[1]).connect()
    async with sole_producer(redis, sys.argv[2], "run"):
        print("holds it", flush=True)
        await asyncio.to_thread(sys.stdin.read)
    await redis.aclose()

asyncio.run(hold())
"""


def start_holder(farm: Farm, key: str) -> subprocess.Popen[bytes]:
    line = [sys.executable, "-c", HOLDER, farm.url, key]
    return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@asynccontextmanager
async def a_holder(farm: Farm, key: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A process that holds the key; killed at the end of the block, and looked after."""
    holder = start_holder(farm, key)
    try:
        assert holder.stdout is not None
        assert await asyncio.to_thread(holder.stdout.readline) == b"holds it\n"
        yield holder
    finally:
        holder.kill()
        holder.communicate()


@pytest.fixture
def key(farm: Farm) -> str:
    return farm.keys.producer("run")


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hold that is renewed, and ends, soon."""
    monkeypatch.setattr(ownership, "HOLD_SECONDS", 0.3)


async def test_a_second_producer_is_refused_by_name(client: Redis, key: str) -> None:
    async with sole_producer(client, key, "run"):
        with pytest.raises(RunInUse) as refused:
            async with sole_producer(client, key, "run"):
                raise AssertionError("two producers")
        assert f"process {os.getpid()} on {socket.gethostname()}" in str(refused.value)
        assert "'run'" in str(refused.value)
    async with sole_producer(client, key, "run"):
        pass
    assert not await client.exists(key)


async def test_two_runs_do_not_know_each_other(client: Redis, farm: Farm) -> None:
    async with (
        sole_producer(client, farm.keys.producer("one"), "one"),
        sole_producer(client, farm.keys.producer("two"), "two"),
    ):
        pass


async def test_the_hold_of_a_killed_process_is_taken_over_at_once(
    client: Redis, farm: Farm, key: str
) -> None:
    async with a_holder(farm, key) as holder:
        with pytest.raises(RunInUse, match=f"process {holder.pid} "):
            async with sole_producer(client, key, "run"):
                pass
    assert await client.pttl(key) > 5_000
    async with sole_producer(client, key, "run") as usurped:
        assert not usurped.done()


async def test_who_was_killed_holds_nothing_before_its_parent_knows(
    client: Redis, farm: Farm, key: str
) -> None:
    """A container's first process may never look after children."""
    async with a_holder(farm, key) as holder:
        holder.kill()
        # It has ended, and stays a zombie.
        await asyncio.to_thread(os.waitid, os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
        async with sole_producer(client, key, "run"):
            pass


async def test_a_process_number_that_came_back_is_not_taken_for_the_holder(
    client: Redis, key: str
) -> None:
    host, pid, started, which = ownership._self().split(" ")
    await client.set(key, f"{host} {pid} {int(started) - 1} {which}", px=60_000)
    async with sole_producer(client, key, "run"):
        pass


async def test_of_another_host_nothing_is_known(client: Redis, key: str) -> None:
    await client.set(key, "elsewhere/boot 1 1", px=60_000)
    with pytest.raises(RunInUse, match="process 1 on elsewhere"):
        async with sole_producer(client, key, "run"):
            pass


@pytest.mark.usefixtures("brief")
async def test_the_hold_is_renewed(client: Redis, key: str) -> None:
    async with sole_producer(client, key, "run") as usurped:

        async def renewed() -> bool:
            before = await client.pttl(key)
            await asyncio.sleep(0.02)
            return before > 0 and await client.pttl(key) > before

        for _ in range(3):
            await until_async(renewed)
        assert not usurped.done()


@pytest.mark.usefixtures("brief")
async def test_a_hold_that_nobody_took_is_taken_again(client: Redis, key: str) -> None:
    async with sole_producer(client, key, "run") as usurped:
        await client.delete(key)
        await until_async(lambda: client.exists(key))
        assert not usurped.done()


@pytest.mark.usefixtures("brief")
async def test_who_lost_the_run_to_another_is_told(client: Redis, key: str) -> None:
    async with sole_producer(client, key, "run") as usurped:
        await client.set(key, "elsewhere/boot 1 1")
        with pytest.raises(RunInUse, match="taken over by process 1 on elsewhere"):
            await asyncio.wait_for(usurped, 10)
    assert await client.get(key) == b"elsewhere/boot 1 1"


@pytest.mark.usefixtures("brief")
async def test_a_fault_does_not_end_the_renewing(
    client: Redis, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sole_producer(client, key, "run") as usurped:
        faults = iter([ConnectionResetError(), ConnectionResetError()])
        acquire = ownership.Lock.acquire

        async def failing(lock: ownership.Lock, *args: object, **options: object) -> bool:
            for fault in faults:
                raise fault
            return await acquire(lock, *args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(ownership.Lock, "acquire", failing)
        await client.delete(key)
        await until_async(lambda: client.exists(key))
        assert not usurped.done()
