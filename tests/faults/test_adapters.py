"""A turn of one adapter that kills each worker, beside the turns of other names in the same engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
from tests.batch import HASHING, Batch
from tests.faults.test_poison import supervised
from tests.processes import SimWorker

from turnmill.client import Client
from turnmill.reply import Failure
from turnmill.settings import Farm
from turnmill.turn import Message, Turn

pytestmark = pytest.mark.faults

NAMES = ("sim", "sim:a", "sim:b")


@pytest.fixture
async def client(farm: Farm) -> AsyncIterator[Client]:
    async with Client(farm.url, namespace=farm.namespace, run="run", poll_seconds=1.0) as client:
        yield client


@pytest.mark.parametrize("beside", [100, 1])
async def test_it_is_convicted_and_those_of_all_names_end_well(
    worker: Callable[..., SimWorker], client: Client, beside: int
) -> None:
    """With one turn of each other name, a death says as little of it as if there were many of its own."""

    def start() -> SimWorker:
        adapters = ("--adapter", "a", "--adapter", "b")
        sim = (*HASHING, *adapters, "--kill-if", "death", "--latency", "0.05")
        return worker("--slots", "50", sim=sim, registers=False)

    killer = Turn(model="sim:a", messages=[Message(role="user", content="death")])
    await client.submit(killer)
    texts = [f"innocent {number}" for number in range(beside)]
    batches = [await Batch.asked(client, texts, model) for model in NAMES]
    async with supervised(start, 2) as dead:
        ending = await client.wait(killer.hash, 90)
        assert isinstance(ending, Failure)
        assert ending.kind == "poison"
        for model, batch in zip(NAMES, batches, strict=True):
            await batch.answered()
            depth = await client.queue.depth(model)
            assert (depth.queued, depth.running, depth.suspects) == (0, 0, 0)
        assert ending.tries == len(dead)
    for batch in batches:
        outcomes = {trace.outcome for trace in await batch.traces()}
        assert outcomes == {"completed"}
