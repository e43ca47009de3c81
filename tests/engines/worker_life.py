"""A worker with a real engine, through a real queue: its answers, its engine's death, and its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

import psutil
from tests.processes import until, until_async

from turnmill import Client, Delta, Reply, Turn
from turnmill.settings import Farm
from turnmill.store import WorkerInfo

START_SECONDS = 300.0


class Workers:
    """Worker processes, one after the other: two engines at once would only wait for each other here."""

    def __init__(
        self,
        engine: str,
        farm: Farm,
        model: Path,
        arguments: Sequence[str],
        environment: dict[str, str],
        log: Path,
    ) -> None:
        self.engine, self._environment = engine, environment
        self._farm, self._log = farm, log
        self._line = [sys.executable, "-m", "turnmill_worker", "--engine", engine]
        self._line += ["--model", str(model), "--served-name", "tiny"]
        self._line += ["--lease", "60", "--keep-every", "0.3", "--", *arguments]
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        with open(self._log, "ab") as log:
            process = subprocess.Popen(
                self._line,
                env={**self._environment, "REDIS_URL": self._farm.url},
                stdout=log,
                stderr=log,
            )
        self.started.append(process)
        return process

    async def serves(self, client: Client) -> WorkerInfo:
        """What the worker started last says of itself, once it does."""

        async def registered() -> WorkerInfo | None:
            assert self.started[-1].poll() is None, self._log.read_text()
            infos = await client.store.workers()
            return next((info for info in infos if info.pid == self.started[-1].pid), None)

        found: WorkerInfo = await until_async(registered, "the worker serves", START_SECONDS)
        return found

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()


async def lives_through_deaths(
    farm: Farm, workers: Workers, slots: int, core: Callable[[int], int]
) -> None:
    """Answers side by side; the engine's process (`core` of a worker's) is killed, then a worker: long answers go on from
    what was kept, as if they had been made at once."""
    async with Client(farm.url) as client:
        worker = workers.start()
        info = await workers.serves(client)
        assert info.model == "tiny"
        assert info.slots == slots  # the engine's own number
        assert info.engine.engine == workers.engine

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

        long = [_turn(f"long {i}", LONG) for i in range(MANY)]
        waiting = await client.submit_many(long[READ:])
        waiting = [turn.hash for turn in long[:READ]] + waiting
        readers = [_Reader(client, turn) for turn in long[:READ]]
        await until_async(lambda: _kept(client, waiting, 60), "much is kept of the long turns", 100)
        await until_async(lambda: _read(readers, 10), "they are read meanwhile")
        children = psutil.Process(worker.pid).children(recursive=True)
        os.kill(core(worker.pid), signal.SIGKILL)
        assert await asyncio.to_thread(worker.wait, 60) == 70

        # Long before the lease of a minute is over.
        depth = await client.queue.depth("tiny")
        assert depth.running == 0
        assert depth.queued == MANY
        assert [await client.result(hash) for hash in waiting] == [None] * MANY
        assert await client.store.workers() == []
        before = [reader.pieces for reader in readers]
        until(lambda: not _left(children), "the engine's processes are gone")

        worker = workers.start()
        await workers.serves(client)
        await until_async(lambda: _kept(client, waiting, 150), "more is kept of them", 100)
        longer = [pieces + 5 for pieces in before]
        await until_async(lambda: _read(readers, *longer), "the text goes on")
        children = psutil.Process(worker.pid).children(recursive=True)
        worker.kill()
        until(lambda: not _left(children), "the engine dies with its worker")
        await client.store.redis.set(farm.keys.lease, 1000)
        await client.store.redis.zadd(
            farm.keys.leases("tiny"), dict.fromkeys(waiting, 1), xx=True
        )  # a minute later
        workers.start()
        last = await workers.serves(client)
        endings = await client.wait_many(waiting, timeout=120)
        whole = await client.wait_many(
            await client.submit_many(_turn(f"long {i}", LONG, sample=1) for i in range(MANY))
        )
        for (hash, reply), at_once in zip(endings.items(), whole.values(), strict=True):
            assert isinstance(reply, Reply)
            assert isinstance(at_once, Reply)
            assert reply.message == at_once.message
            assert (reply.finish_reason, reply.capped) == ("length", "output")
            assert reply.usage.completion_tokens == LONG
            assert reply.usage.prompt_tokens == at_once.usage.prompt_tokens
            assert reply.logprobs is not None
            assert at_once.logprobs is not None
            tokens, others = reply.logprobs["content"], at_once.logprobs["content"]
            assert [token["token"] for token in tokens] == [other["token"] for other in others]
            trace = await client.trace(hash)
            assert trace is not None
            assert trace.worker == last.id
            assert [entry.outcome for entry in trace.earlier] == ["death", "lapse"]
            assert (trace.resumed_at or 0) >= 150
        for reader, at_once in zip(readers, whole.values(), strict=False):
            assert isinstance(at_once, Reply)
            await asyncio.wait_for(reader.task, 60)
            assert str(at_once.message.content).startswith(reader.text)
            assert len(reader.text) > len(str(at_once.message.content)) // 2


class _Reader:
    """Reads an answer while it grows."""

    def __init__(self, client: Client, turn: Turn) -> None:
        self.text, self.pieces = "", 0
        self.task = asyncio.create_task(self._read(client, turn))

    async def _read(self, client: Client, turn: Turn) -> None:
        async for piece in client.stream(turn):
            if isinstance(piece, Delta):
                self.text += piece.content
                self.pieces += 1


async def _read(readers: list[_Reader], *least: int) -> bool:
    assert not any(reader.task.done() for reader in readers)
    return all(r.pieces >= n for r, n in zip(readers, cycle(least), strict=False))


READ = 6
"""Of the long turns, somebody reads so many while they grow."""
LONG = 450
MANY = 24
"""Long turns at once: fewer would be done too soon."""


async def _kept(client: Client, hashes: list[str], least: int) -> bool:
    """Whether at least so many tokens are kept of each of these growing answers."""
    prefix = client.farm.keys.prefix
    counts = [await client.store.redis.hget(f"{prefix}t:{hash}", "kept") for hash in hashes]
    return all(int(count or 0) >= least for count in counts)


def _turn(text: str, max_tokens: int, sample: int = 0) -> Turn:
    return Turn.model_validate(
        {
            "model": "tiny",
            "sample": sample,
            "messages": [{"role": "user", "content": text}],
            "sampling": {
                "temperature": 0,
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "logprobs": True,
                "repetition_penalty": 1.0,  # the model has one, and then nothing can be kept
            },
        }
    )


def _left(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run. One whose end nobody has looked at runs no more."""
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
