"""Turns for benchmarks: no work for the scripted engine, about 1 kB each, all distinct."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Sequence

from benchmarks.rivals.noop import TEXT
from turnmill.queue import BATCH_TURNS, Ask, Lane, Queue
from turnmill.settings import Farm
from turnmill.turn import Message, Sampling, Turn
from turnmill.wire import encode_turn

MODEL, RUN = "sim", "bench"


def turn(number: int) -> Turn:
    return Turn(
        model=MODEL,
        messages=[
            Message(role="system", content=TEXT),
            Message(role="user", content=f"Turn {number}."),
        ],
        sampling=Sampling(temperature=0),
    )


def asks(first: int, count: int) -> Iterator[Ask]:
    """The asks of `turn(first)` and those after it. Their canonical JSON is written directly: millions of turns
    need no models."""
    before, after = encode_turn(turn(0)).split(b"Turn 0.")
    for number in range(first, first + count):
        body = b"%sTurn %d.%s" % (before, number, after)
        yield Ask(hashlib.sha256(body).hexdigest(), body)


def batches(asks: Sequence[Ask]) -> Iterator[Sequence[Ask]]:
    for start in range(0, len(asks), BATCH_TURNS):
        yield asks[start : start + BATCH_TURNS]


async def fill(farm: Farm, asked: Sequence[Ask]) -> None:
    async with farm.connect() as client:
        queue = Queue(client, farm.keys)
        for batch in batches(asked):
            await queue.enqueue(MODEL, batch, Lane(RUN))


def fill_now(farm: Farm, asked: Sequence[Ask]) -> None:
    asyncio.run(fill(farm, asked))
