"""Answers read while they grow: whole workers, killed and not."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Callable
from itertools import accumulate, pairwise

import pytest
from redis.asyncio import Redis
from tests.processes import SimWorker, until_async

from turnmill import Client, Delta, Failure, Reply, StreamBroken, Turn
from turnmill.settings import Farm
from turnmill.store import Ending
from turnmill_worker.engines.sim import follows

Workers = Callable[..., SimWorker]

CHAIN = ("--answer", "chain", "--answer-tokens", "200", "--tokens-per-second", "100")
SLOW = ("--answer", "chain", "--answer-tokens", "4000", "--tokens-per-second", "100")


def turn(text: str = "Tell me of the mill", **fields: object) -> Turn:
    messages = [{"role": "user", "content": text}]
    return Turn.model_validate({"model": "sim", "messages": messages, **fields})


@pytest.fixture
async def asking(farm: Farm) -> AsyncIterator[Client]:
    async with Client(farm.url, namespace=farm.namespace) as client:
        yield client


class Reader:
    """Reads a turn, as fast as it comes."""

    def __init__(self, client: Client, turn: Turn) -> None:
        self.turn, self.pieces = turn, list[str]()
        self.ending: Ending | None = None
        self.task = asyncio.create_task(self._read(client))

    async def _read(self, client: Client) -> None:
        async for piece in client.stream(self.turn):
            assert self.ending is None, "something came after the ending"
            if isinstance(piece, Delta):
                assert piece.content
                self.pieces.append(piece.content)
            else:
                self.ending = piece

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    async def has(self, words: int) -> None:
        async def enough() -> bool:
            assert not self.task.done(), "it has ended"
            return len(self.text.split()) >= words

        await until_async(enough, f"{words} words were read")

    async def ends(self, seconds: float = 60) -> str:
        """The content of the reply, which goes on from what was read."""
        await asyncio.wait_for(self.task, seconds)
        assert isinstance(self.ending, Reply)
        content = str(self.ending.message.content)
        assert content.startswith(self.text)
        return content


def of_one_piece(content: str) -> int:
    """How many tokens a chain has, if two answers were not mixed."""
    tokens = content.split()
    assert all(follows(one) == next_one for one, next_one in pairwise(tokens))
    return len(tokens)


async def test_an_answer_is_read_while_it_grows(worker: Workers, asking: Client) -> None:
    worker(sim=CHAIN)
    reader = Reader(asking, turn())
    await reader.has(1)
    assert await asking.result(reader.turn.hash) is None  # it is not there yet
    content = await reader.ends()
    assert of_one_piece(content) == 200
    assert len(reader.pieces) > 5
    assert len(reader.text.split()) > 150
    (again,) = [piece async for piece in asking.stream(reader.turn)]
    assert again == reader.ending


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_the_death_of_a_worker_is_a_pause(
    worker: Workers, asking: Client, number: signal.Signals
) -> None:
    first = worker("--drain", "0", sim=CHAIN)
    readers = [Reader(asking, turn(f"turn {i}")) for i in range(20)]
    for reader in readers:
        await reader.has(30)
    first.signal(number)
    await asyncio.to_thread(first.wait)
    read = [reader.text for reader in readers]
    worker(sim=CHAIN)
    for reader, before in zip(readers, read, strict=True):
        assert of_one_piece(await reader.ends()) == 200
        assert reader.text.startswith(before)
        assert len(reader.text) > len(before)
        trace = await asking.trace(reader.turn.hash)
        assert trace is not None
        assert (trace.resumed_at or 0) >= 30


async def test_a_second_reader_starts_with_the_text_so_far(
    worker: Workers, asking: Client, farm: Farm
) -> None:
    worker(sim=CHAIN)
    first = Reader(asking, turn())
    await first.has(20)
    async with Client(farm.url, namespace=farm.namespace, run="other") as elsewhere:
        second, third = Reader(asking, turn()), Reader(elsewhere, turn())
        await second.has(20)
        await third.has(20)
        assert first.text.startswith(second.pieces[0])
        assert first.text.startswith(third.pieces[0])
        contents = [await reader.ends() for reader in (first, second, third)]
    assert contents == [contents[0]] * 3


async def test_a_turn_that_runs_already_is_read_from_its_beginning(
    worker: Workers, asking: Client, client: Redis, farm: Farm
) -> None:
    worker("--keep-every", "0.3", sim=SLOW)
    asked = turn(sampling={"max_tokens": 400})
    await asking.submit(asked)

    async def kept() -> bool:
        return int(await client.hget(farm.keys.tries(asked.hash), "kept") or 0) > 30

    await until_async(kept, "it runs")
    assert not await client.exists(farm.keys.told_of(asked.hash))
    reader = Reader(asking, asked)
    await reader.has(60)
    assert of_one_piece(await reader.ends()) == 400


async def test_who_stops_reading_leaves_the_turn(worker: Workers, asking: Client) -> None:
    worker(sim=CHAIN)
    pieces = asking.stream(turn())
    assert isinstance(await anext(pieces), Delta)
    await pieces.aclose()  # type: ignore[attr-defined]
    cancelled = Reader(asking, turn())
    await cancelled.has(10)
    cancelled.task.cancel()
    ending = await asyncio.wait_for(asking.wait(turn().hash), 30)
    assert isinstance(ending, Reply)
    assert of_one_piece(str(ending.message.content)) == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": {"seed": 1}},
        {"sampling": {"frequency_penalty": 0.5}},
        {"tools": [{"function": {"name": "f"}}]},
        {"response_format": {"type": "json_object"}},
    ],
    ids=["seed", "penalty", "tools", "grammar"],
)
async def test_what_cannot_go_on_comes_as_a_whole(
    worker: Workers, asking: Client, fields: dict[str, object]
) -> None:
    worker(sim=CHAIN)
    reader = Reader(asking, turn(**fields))
    assert of_one_piece(await reader.ends()) == 200
    assert reader.pieces == []


async def test_a_failure_is_an_ending(worker: Workers, asking: Client) -> None:
    worker(sim=("--reject-if", "bad", *SLOW))
    refused = Reader(asking, turn("bad"))
    await asyncio.wait_for(refused.task, 30)
    assert isinstance(refused.ending, Failure)
    cancelled = Reader(asking, turn())
    await cancelled.has(5)
    await asking.cancel([turn().hash])
    await asyncio.wait_for(cancelled.task, 30)
    assert isinstance(cancelled.ending, Failure)
    assert cancelled.ending.kind == "cancelled"


async def test_another_engine_breaks_the_stream_and_answers_the_turn(
    worker: Workers, asking: Client
) -> None:
    first = worker(sim=SLOW)
    reader = Reader(asking, turn())
    await reader.has(30)
    waiting = asyncio.create_task(asking.ask(turn()))
    first.kill()
    other = ("--model", "another", "--served-name", "sim")
    worker(
        *other, sim=("--answer", "chain", "--answer-tokens", "300", "--tokens-per-second", "100")
    )
    with pytest.raises(StreamBroken):
        await asyncio.wait_for(reader.task, 30)
    assert not waiting.done()
    late = Reader(asking, turn())  # reads the new answer
    await late.has(50)
    content = await late.ends()
    ending = await waiting
    assert isinstance(ending, Reply)
    assert ending.message.content == content
    assert of_one_piece(content) == 300


@pytest.mark.parametrize("kill", [False, True])
async def test_nothing_is_told_that_may_begin_a_stop_string(
    worker: Workers, asking: Client, kill: bool
) -> None:
    said = " ".join(f"mill stone {i}" for i in range(100)) + " mill stone? And more"
    stops = ["mill stone?", "9 mil "]
    speed = ("--tokens-per-second", "100")
    first = worker(sim=speed)
    reader = Reader(asking, turn(said, sampling={"stop": stops}))
    await reader.has(30)
    if kill:
        first.kill()
        worker(sim=speed)
    content = await reader.ends()
    assert content == said[: said.index("mill stone?")]
    assert len(reader.text.split()) > 150
    assert all(re.search(r"\d$", text) for text in accumulate(reader.pieces))


async def test_characters_are_never_cut(worker: Workers, asking: Client) -> None:
    worker(sim=("--tokens-per-second", "100"))
    said = " ".join(["Grüße", "水车", "👩‍🌾", "磨坊", "naïve"] * 30)
    reader = Reader(asking, turn(said))
    assert await reader.ends() == said
    assert len(reader.pieces) > 5


async def test_five_hundred_are_read_at_once(
    worker: Workers, asking: Client, client: Redis
) -> None:
    connections = len(await client.client_list())
    workers = [worker("--slots", "130", sim=CHAIN, lease=5) for _ in range(4)]
    of_workers = len(await client.client_list()) - connections
    readers = [Reader(asking, turn(f"turn {i}")) for i in range(500)]
    for reader in readers:
        await reader.has(5)
    assert len(await client.client_list()) - connections - of_workers <= 16 + 8 * len(workers)
    for reader in readers:
        assert of_one_piece(await reader.ends(120)) == 200
        assert len(reader.pieces) > 3


async def test_asks_of_one_moment_are_one_turn(worker: Workers, asking: Client) -> None:
    """Whoever asks first: a reader that joins an ask which has not left yet is heard too."""
    plain = asyncio.create_task(asking.ask(turn("a")))
    await asyncio.sleep(0)
    readers = [Reader(asking, turn("a")), Reader(asking, turn("b"))]
    also = asyncio.create_task(asking.ask(turn("b")))
    worker(sim=CHAIN)
    for reader in readers:
        await reader.has(5)
    for reader, ask in zip(readers, (plain, also), strict=True):
        content = await reader.ends()
        ending = await ask
        assert isinstance(ending, Reply)
        assert ending.message.content == content
