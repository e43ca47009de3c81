"""Workers in front of servers that go away: no turn fails for it, and none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from tests.engines.conftest import AIOHTTP
from tests.engines.scripted_server import ScriptedServer
from tests.processes import SimWorker, until_async

from turnmill import Client, Failure, Reply, Turn
from turnmill.settings import Farm
from turnmill.turn import Message, Sampling

pytestmark = pytest.mark.skipif(not AIOHTTP, reason="aiohttp is not installed here")


@pytest.fixture
def servers() -> Iterator[Callable[[], ScriptedServer]]:
    started: list[ScriptedServer] = []

    def start() -> ScriptedServer:
        started.append(ScriptedServer(speed=50.0))
        return started[-1]

    yield start
    for server in started:
        server.close()


def ask_all(client: Client, count: int) -> list[asyncio.Task[object]]:
    sampling = Sampling(ignore_eos=True, max_tokens=60)
    return [
        asyncio.create_task(
            client.ask(
                Turn(
                    model="scripted",
                    messages=[Message(role="user", content=f"Turn {n}")],
                    sampling=sampling,
                )
            )
        )
        for n in range(count)
    ]


async def states(client: Client) -> list[str]:
    return sorted(info.state for info in await client.store.workers())


async def test_turns_wait_for_a_server_that_starts_again(
    farm: Farm, worker: Callable[..., SimWorker], servers: Callable[[], ScriptedServer]
) -> None:
    server = servers()
    one = worker("--engine", "openai", "--slots", "4", sim=(server.url,))
    async with Client(farm.url, namespace=farm.namespace) as client:
        asked = ask_all(client, 12)

        async def halfway() -> bool:
            return server.engine.running() > 0 and sum(task.done() for task in asked) >= 2

        await until_async(halfway)
        server.stop()

        async def away() -> bool:
            return await states(client) == ["away"]

        await until_async(away)
        requests = len(server.asked)
        server.start()
        replies = await asyncio.gather(*asked)
        assert all(isinstance(reply, Reply) for reply in replies)
        assert await states(client) == ["serving"]
        tries = [
            entry
            for reply in replies
            if isinstance(reply, Reply) and (trace := await client.trace(reply.hash))
            for entry in trace.earlier
        ]
        assert {entry.outcome for entry in tries} <= {"death", "handback"}
        assert 0 < len(tries) <= 2 * len(replies)  # it does not claim what it can only hand back
    assert len(server.asked) > requests
    assert one.process.poll() is None
    assert one.log.count("is away") == one.log.count("is there again after") == 1


async def test_the_turns_of_a_server_that_died_are_answered_by_another(
    farm: Farm, worker: Callable[..., SimWorker], servers: Callable[[], ScriptedServer]
) -> None:
    dies, lives = servers(), servers()
    for server in (dies, lives):
        worker("--engine", "openai", "--slots", "4", sim=(server.url,))
    async with Client(farm.url, namespace=farm.namespace) as client:
        asked = ask_all(client, 16)

        async def both() -> bool:
            return dies.engine.running() > 0 and lives.engine.running() > 0

        await until_async(both)
        dies.stop()
        replies = await asyncio.gather(*asked)
        assert all(isinstance(reply, Reply) for reply in replies)
        assert await states(client) == ["away", "serving"]


async def test_a_turn_that_takes_its_server_down_again_and_again_is_found(
    farm: Farm, worker: Callable[..., SimWorker], servers: Callable[[], ScriptedServer]
) -> None:
    server = servers()
    worker("--engine", "openai", "--slots", "4", sim=(server.url,))
    server.deadly = "fatal"
    async with Client(farm.url, namespace=farm.namespace) as client:
        asked = ask_all(client, 4)
        fatal = Turn(model="scripted", messages=[Message(role="user", content="fatal")])
        failure = await client.ask(fatal)
        assert isinstance(failure, Failure)
        assert failure.kind == "poison"
        replies = await asyncio.gather(*asked)
        assert all(isinstance(reply, Reply) for reply in replies)
