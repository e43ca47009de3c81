"""Answers that are read while they grow, while Redis and workers fail: nothing is said twice, and nothing is missing."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
from tests.faults.proxy import LossyProxy
from tests.processes import SimWorker, ValkeyServer, until_async

from turnmill import Client, Delta, Reply, Turn
from turnmill.settings import Farm
from turnmill_worker.engines.sim import follows
from turnmill_worker.scripts import CLAIM, FINISH, KEEP, RENEW

WorkerFactory = Callable[..., SimWorker]

pytestmark = pytest.mark.faults

CHAIN = ("--answer", "chain", "--answer-tokens", "300", "--tokens-per-second", "100")
COUNT = 10


class Readers:
    """Some turns, each read as it grows."""

    def __init__(self, client: Client) -> None:
        self.texts = dict.fromkeys(range(COUNT), "")
        self.endings = dict[int, Reply]()
        self._tasks = [asyncio.create_task(self._read(client, i)) for i in range(COUNT)]

    async def _read(self, client: Client, number: int) -> None:
        messages = [{"role": "user", "content": f"turn {number}"}]
        turn = Turn.model_validate({"model": "sim", "messages": messages})
        async for piece in client.stream(turn):
            if isinstance(piece, Delta):
                self.texts[number] += piece.content
            else:
                assert isinstance(piece, Reply)
                self.endings[number] = piece

    async def have(self, words: int) -> None:
        async def enough() -> bool:
            assert not any(task.done() for task in self._tasks), "one has ended"
            return all(len(text.split()) >= words for text in self.texts.values())

        await until_async(enough, f"{words} words were read of each")

    async def end_right(self) -> None:
        await asyncio.wait_for(asyncio.gather(*self._tasks), 60)
        for number, reply in self.endings.items():
            content = str(reply.message.content)
            tokens = content.split()
            assert len(tokens) == 300
            assert all(follows(one) == next_one for one, next_one in pairwise(tokens))
            assert content.startswith(self.texts[number])
            assert len(self.texts[number].split()) > 150


async def test_answers_of_scripts_that_are_lost(
    worker: WorkerFactory, farm: Farm, valkey: ValkeyServer
) -> None:
    with LossyProxy(valkey.socket) as proxy:
        lossy = Farm(proxy.url, farm.namespace)
        async with Client(lossy.url, namespace=farm.namespace) as client:
            proxy.lose(CLAIM)
            first = worker(sim=CHAIN, farm=lossy)
            readers = Readers(client)
            for words in range(20, 100, 20):
                proxy.lose(KEEP)
                await readers.have(words)
            first.kill()
            second = worker(sim=CHAIN, farm=lossy)
            proxy.lose(KEEP)
            proxy.lose(RENEW)
            await readers.have(150)
            proxy.lose(FINISH)
            await readers.end_right()
            assert proxy.lost == 8
            assert second.process.poll() is None


async def test_a_restart_of_redis_is_a_pause(
    worker: WorkerFactory, own_valkey: Callable[..., ValkeyServer]
) -> None:
    server = own_valkey(appendfsync="always")
    farm = Farm(server.url)
    async with Client(farm.url) as client:
        worker(sim=CHAIN, farm=farm, lease=5)
        readers = Readers(client)
        await readers.have(30)
        server.kill()
        server.start()
        await readers.have(100)
        await readers.end_right()


async def test_a_worker_that_comes_back_from_a_long_sleep_says_nothing_more(
    worker: WorkerFactory, farm: Farm
) -> None:
    async with Client(farm.url, namespace=farm.namespace) as client:
        sleeps = worker(sim=CHAIN)
        readers = Readers(client)
        await readers.have(30)
        sleeps.signal(signal.SIGSTOP)
        worker(sim=CHAIN)
        await readers.have(80)
        sleeps.signal(signal.SIGCONT)
        await readers.end_right()
        traces = [await client.trace(reply.hash) for reply in readers.endings.values()]
        assert all(trace and (trace.resumed_at or 0) >= 30 for trace in traces)


async def test_readers_of_another_process_are_killed_and_come_again(
    worker: WorkerFactory, farm: Farm
) -> None:
    worker(sim=CHAIN)
    open_client = partial(Client, farm.url, namespace=farm.namespace)
    async with open_client() as client:
        first = Readers(client)
        await first.have(30)
        read = dict(first.texts)
        for task in first._tasks:
            task.cancel()
    async with open_client(run="another") as client:
        second = Readers(client)
        await second.have(60)
        await second.end_right()
        assert all(second.texts[number].startswith(text) for number, text in read.items())
