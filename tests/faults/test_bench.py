"""A worker that crashes three times in ten minutes benches itself and says so."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tests.batch import HASHING, Batch, held, id_of
from tests.processes import SimWorker, until_async

from turnmill.client import Client
from turnmill.settings import Farm
from turnmill_worker.bench import WITHIN, Bench, Station

WorkerFactory = Callable[..., SimWorker]

pytestmark = pytest.mark.faults


@pytest.fixture
async def asking(farm: Farm) -> AsyncIterator[Client]:
    async with Client(farm.url, namespace=farm.namespace, run="run") as client:
        yield client


def key(farm: Farm, engine: str = "sim", model: str | None = None) -> str:
    return farm.keys.crashes(Station.here(engine, model).name)


async def reasons(asking: Client, engine: str = "sim", model: str | None = None) -> list[str]:
    """Why this station has crashed, oldest first."""
    entries = await asking.store.redis.xrange(key(asking.farm, engine, model))
    return [fields[b"why"].decode() for _, fields in entries]


async def crash(asking: Client, *ago: float) -> None:
    """This station has crashed so many seconds ago."""
    seconds, _ = await asking.store.redis.time()
    for number, one in enumerate(ago):
        id = f"{int((seconds - one) * 1000)}-{number}"
        await asking.store.redis.xadd(key(asking.farm), {"why": f"crash {number}"}, id=id)


async def benched(asking: Client, worker: SimWorker) -> None:
    async def sits() -> bool:
        return [one.pid for one in (await asking.status()).benched] == [worker.pid]

    await until_async(sits, "the worker is benched")


def status(farm: Farm, *options: str) -> str:
    environment = {**os.environ, "REDIS_URL": farm.url, "TURNMILL_NAMESPACE": farm.namespace}
    done = subprocess.run(
        [sys.executable, "-m", "turnmill", "status", *options],
        env={**environment, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


async def test_after_three_crashes_it_waits_and_says_so(
    worker: WorkerFactory, asking: Client, farm: Farm
) -> None:
    for number in range(3):
        one = worker(sim=("--die-if", "death"))
        batch = await Batch.asked(asking, [f"death {number}"])
        assert one.wait() == 70
        await batch.cancel()
    assert await reasons(asking) == ["the engine died: the engine was told to die"] * 3
    batch = await Batch.asked(asking, ["turn"])
    fourth = worker(sim=HASHING, registers=False)
    await benched(asking, fourth)
    (line,) = fourth.log.splitlines()
    assert "benched: 3 crashes within 10 minutes" in line
    assert "the engine was told to die" in line
    assert key(farm) in line
    (said,) = json.loads(status(farm, "--json"))["benched"]
    assert (said["host"], said["pid"], said["engine"]) == (socket.gethostname(), fourth.pid, "sim")
    table = status(farm)
    assert "benched" in table
    assert "the engine was told to die" in table
    # Whoever has mended it need not wait.
    await asking.store.redis.delete(key(farm))
    await batch.answered()
    assert (await batch.audit()).clean
    assert (await asking.status()).benched == []
    assert "benched" not in status(farm)


async def test_the_bench_ends_when_the_first_crash_is_ten_minutes_old(
    worker: WorkerFactory, asking: Client
) -> None:
    await crash(asking, WITHIN - 4, 100, 2)
    one = worker(registers=False)
    await benched(asking, one)
    assert await asking.store.workers() == []
    batch = await Batch.asked(asking, ["turn"])
    await batch.answered()
    assert "off the bench" in one.log


async def test_crashes_of_long_ago_or_elsewhere_bench_nobody(
    worker: WorkerFactory, asking: Client
) -> None:
    await crash(asking, WITHIN + 1, 2, 1)
    worker()
    for number in range(3):
        Bench(asking.farm, Station.here("sim", "other")).record(f"{number}")
    worker()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_told_to_end_on_the_bench_it_ends_with_0(
    worker: WorkerFactory, asking: Client, number: signal.Signals
) -> None:
    await crash(asking, 3, 2, 1)
    one = worker(registers=False)
    await benched(asking, one)
    one.signal(number)
    assert one.wait() == 0
    assert await asking.store.benched() == []


async def test_a_worker_killed_from_outside_has_not_crashed(
    worker: WorkerFactory, asking: Client
) -> None:
    one = worker(sim=("--hang-if", "slow"))
    await Batch.asked(asking, ["slow"])
    await held(asking, {await id_of(asking, one): 1})
    one.kill()
    assert await reasons(asking) == []


async def test_a_worker_that_holds_suspects_is_not_to_blame(
    worker: WorkerFactory, asking: Client
) -> None:
    batch = await Batch.asked(asking, ["death"])
    (hash,) = batch.hashes
    died = 0
    while await asking.store.failure(hash) is None:
        assert worker(sim=("--die-if", "death"), registers=False).wait() == 70
        died += 1
    assert died > 3
    # Those of the first two workers, which had any company; then the turn was a suspect.
    assert len(await reasons(asking)) == 2


async def test_an_engine_that_stalls_has_crashed(worker: WorkerFactory, asking: Client) -> None:
    one = worker("--stalled-after", "3", sim=("--freeze-if", "freeze"))
    await Batch.asked(asking, ["freeze"])
    assert one.wait() == 70
    assert await reasons(asking) == ["the engine has not moved for 3 s"]


async def test_a_suspect_that_stalls_its_engine_is_to_blame(
    worker: WorkerFactory, asking: Client
) -> None:
    batch = await Batch.asked(asking, ["freeze"])
    (hash,) = batch.hashes
    await asking.store.redis.hset(f"{asking.farm.keys.prefix}t:{hash}", "strikes", 2)
    await asking.store.redis.zadd(asking.farm.keys.suspects("sim"), {hash: 1})
    one = worker("--stalled-after", "3", sim=("--freeze-if", "freeze"))
    assert one.wait() == 70
    assert await reasons(asking) == []


async def test_an_engine_that_does_not_start_has_crashed(
    asking: Client, farm: Farm, tmp_path: Path
) -> None:
    said = "libcuda.so.1: cannot open shared object file"
    (tmp_path / "xllamacpp.py").write_text(f"raise ImportError({said!r})")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "turnmill_worker", "--engine", "local", "--served-name", "m"),
        env={
            **os.environ,
            "REDIS_URL": farm.url,
            "TURNMILL_NAMESPACE": farm.namespace,
            "PYTHONPATH": str(tmp_path),
        },
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert await process.wait() == 70
    assert await reasons(asking, "local", "m") == [f"the engine did not start: {said}"]


def test_a_redis_that_does_not_answer_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "turnmill")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        bench = Bench(Farm(f"redis://127.0.0.1:{port}"), Station.here("sim", None))
        bench.record("it broke")
        bench.wait()
    assert "the crash could not be recorded" in caplog.text
    assert "cannot be seen" in caplog.text
