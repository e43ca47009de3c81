"""How many conversations a run has under way: it follows the slots of the workers that live."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tests.processes import SimWorker, until_async

from turnmill import Client
from turnmill.conversations import Conversation
from turnmill.output import RunFiles
from turnmill.run import FEWEST_AT_ONCE, PER_SLOT, Run
from turnmill.run_settings import RunSettings
from turnmill.scaffolds.multi_turn_chat import multi_turn_chat
from turnmill.settings import Farm
from turnmill.tasks import end_tasks

Workers = Callable[..., SimWorker]

SLOTS = 20


@asynccontextmanager
async def driven(farm: Farm, folder: Path, concurrency: int | None = None) -> AsyncIterator[Run]:
    """A run with more conversations than are ever under way."""
    items = [Conversation(id=f"c{i}", turns=[f"{i}"]) for i in range(20_000)]
    settings = RunSettings("r", "sim", concurrency=concurrency)
    async with Client(farm.url, namespace=farm.namespace, run="r", patience=None) as client:
        with RunFiles(folder / "r", "r") as files:
            run = Run(settings, items, multi_turn_chat, client, files)
            driving = asyncio.create_task(run.drive())
            try:
                yield run
            finally:
                await end_tasks([driving])


async def under_way(run: Run, number: int) -> None:
    async def as_many() -> bool:
        return run.progress.running == number

    await until_async(as_many, f"{number} under way, not {run.progress.running}")


def start(worker: Workers, latency: str) -> SimWorker:
    return worker("--slots", str(SLOTS), sim=("--latency", latency))


async def test_it_follows_workers_that_come_and_go(
    farm: Farm, tmp_path: Path, worker: Workers
) -> None:
    async with driven(farm, tmp_path) as run:
        await under_way(run, FEWEST_AT_ONCE)
        first = await asyncio.to_thread(start, worker, "0.3")
        await under_way(run, PER_SLOT * SLOTS)
        await asyncio.to_thread(start, worker, "0.3")
        await under_way(run, 2 * PER_SLOT * SLOTS)
        first.kill()
        await under_way(run, PER_SLOT * SLOTS)


async def test_more_are_begun_without_one_that_ends(
    farm: Farm, tmp_path: Path, worker: Workers
) -> None:
    """Long answers do not keep a new worker waiting for work."""
    await asyncio.to_thread(start, worker, "1000")
    async with driven(farm, tmp_path) as run:
        await under_way(run, PER_SLOT * SLOTS)
        await asyncio.to_thread(start, worker, "1000")
        await under_way(run, 2 * PER_SLOT * SLOTS)
        assert run.progress.ended == 0


async def test_a_number_stays(farm: Farm, tmp_path: Path, worker: Workers) -> None:
    async with driven(farm, tmp_path, concurrency=3) as run:
        await under_way(run, 3)
        await asyncio.to_thread(start, worker, "1000")

        async def seen() -> int:
            return run.progress.slots

        assert await until_async(seen, "the worker is seen") == SLOTS
        assert run.progress.running == 3
