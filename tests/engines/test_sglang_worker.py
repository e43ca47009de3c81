"""A worker with the real SGLang: what it says of itself, its answers, and its death."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.engines import sglang_env
from tests.processes import ValkeyServer, until, until_async

from turnmill import Client, Reply, Turn
from turnmill.settings import Farm
from turnmill.store import WorkerInfo

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

START_SECONDS = 300.0


@pytest.fixture
def farm(own_valkey: Callable[..., ValkeyServer]) -> Farm:
    return Farm(own_valkey().url)


@pytest.fixture
def worker(farm: Farm, sglang_model: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    line = [sys.executable, "-m", "turnmill_worker", "--engine", "sglang"]
    line += ["--model", str(sglang_model), "--served-name", "tiny", "--lease", "60"]
    with open(tmp_path / "worker.log", "wb") as log:
        process = subprocess.Popen(
            [*line, "--", *sglang_env.ARGUMENTS],
            env={**sglang_env.environment(), "REDIS_URL": farm.url},
            stdout=log,
            stderr=log,
        )
    yield process
    process.kill()
    process.wait()


async def test_answers_side_by_side_and_hands_back_when_the_engine_dies(
    farm: Farm, worker: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    async with Client(farm.url) as client:

        async def registered() -> WorkerInfo | None:
            assert worker.poll() is None, (tmp_path / "worker.log").read_text()
            return next(iter(await client.store.workers()), None)

        info = await until_async(registered, "the worker serves", START_SECONDS)
        assert info.model == "tiny"
        assert info.slots == 32  # SGLang's own number: --max-running-requests
        assert info.engine.engine == "sglang"

        endings = await client.wait_many(
            await client.submit_many(_turn(f"short {i}", max_tokens=8) for i in range(40))
        )
        assert len(endings) == 40
        assert all(isinstance(ending, Reply) for ending in endings.values())
        trace = await client.trace(next(iter(endings)))
        assert trace is not None
        assert trace.request is not None
        assert trace.request["endpoint"] == "engine.generate"
        assert trace.engine == info.engine

        waiting = await client.submit_many(_turn(f"long {i}", max_tokens=400) for i in range(5))

        async def in_the_engine() -> bool:
            return (await client.queue.depth("tiny")).running == 5

        await until_async(in_the_engine, "the long turns are running")
        os.kill(_scheduler(worker.pid), signal.SIGKILL)
        assert await asyncio.to_thread(worker.wait, 60) == 70

        # Long before the lease of a minute is over.
        depth = await client.queue.depth("tiny")
        assert depth.running == 0
        assert depth.queued == 5
        assert [await client.result(hash) for hash in waiting] == [None] * 5
        assert await client.store.workers() == []
    until(lambda: not _sglang_left(worker.pid), "SGLang's processes are gone")


def _turn(text: str, max_tokens: int) -> Turn:
    return Turn.model_validate(
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": text}],
            "sampling": {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True},
        }
    )


def _scheduler(pid: int) -> int:
    children = psutil.Process(pid).children(recursive=True)
    return next(child.pid for child in children if "scheduler" in " ".join(child.cmdline()))


def _sglang_left(pid: int) -> list[int]:
    return [p.pid for p in psutil.process_iter() if p.ppid() == pid]
