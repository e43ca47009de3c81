"""Reading answers while they grow: the reader's side, with what workers tell written by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from tests.by_hand import h
from tests.processes import until_async

from turnmill import StreamBroken
from turnmill.reading import Listener, Reading
from turnmill.settings import Farm

LINE, OTHER = b"a" * 24, b"b" * 24


class Telling:
    """A worker that tells, and Redis that may lose it."""

    def __init__(self, redis: Redis, farm: Farm) -> None:
        self.redis, self.keys = redis, farm.keys
        self.lines: dict[str, tuple[bytes, bytes]] = {}

    async def say(self, name: str, text: str, line: bytes = LINE, *, unheard: bool = False) -> None:
        before, told = self.lines.get(name, (line, b""))
        if before != line:
            told = b""
        self.lines[name] = (line, told + text.encode())
        await self.redis.set(self.keys.told_of(h(name)), b"".join(self.lines[name]))
        if not unheard:
            value = b"%s%d %s" % (line, len(told), text.encode())
            await self.redis.xadd(self.keys.told("m"), {h(name): value, h("another's"): value})

    async def end(self, name: str) -> None:
        await self.redis.delete(self.keys.told_of(h(name)))


@pytest.fixture
def telling(client: Redis, farm: Farm) -> Telling:
    return Telling(client, farm)


@pytest.fixture
async def listener(farm: Farm) -> AsyncIterator[Listener]:
    redis = farm.connect()
    listener = Listener(redis, farm.keys, "m")
    yield listener
    await listener.end()
    await redis.aclose(close_connection_pool=True)


async def reads(reading: Reading, text: str) -> list[str]:
    """The pieces until they make this text."""
    pieces: list[str] = []
    async with asyncio.timeout(20):
        while "".join(pieces) != text:
            assert text.startswith("".join(pieces))
            if new := reading.take():
                pieces.append(new)
            else:
                await reading.wait()
    return pieces


async def broken(reading: Reading) -> None:
    with pytest.raises(StreamBroken, match=f"turn {reading.hash[:12]}: its answer does not"):
        await reads(reading, "more")


async def test_pieces_come_as_they_are_told(telling: Telling, listener: Listener) -> None:
    reading = listener.open(h("a"))
    await telling.say("a", "Grüße ")
    await reads(reading, "Grüße ")
    await telling.say("a", "aus ")
    await reads(reading, "aus ")
    await telling.say("a", "der Mühle")
    assert await reads(reading, "der Mühle") == ["der Mühle"]


async def test_who_comes_late_gets_the_text_so_far(telling: Telling, listener: Listener) -> None:
    first = listener.open(h("a"))
    words = [f"word{number} " for number in range(50)]  # when the first has long caught up
    for word in words:
        await telling.say("a", word)
        await reads(first, word)
    second = listener.open(h("a"))
    assert await reads(second, "".join(words)) == ["".join(words)]
    await telling.say("a", "more")
    for reading in (first, second):
        assert await reads(reading, "more") == ["more"]


async def test_what_is_missing_is_read_at_the_next_piece(
    telling: Telling, listener: Listener
) -> None:
    reading = listener.open(h("a"))
    await telling.say("a", "one ")
    await reads(reading, "one ")
    await telling.say("a", "two ", unheard=True)
    await telling.say("a", "three")
    await reads(reading, "two three")


async def test_a_slow_reader_gets_many_pieces_as_one(telling: Telling, listener: Listener) -> None:
    reading, beside = listener.open(h("a")), listener.open(h("b"))
    await telling.say("a", "zero ")
    await reads(reading, "zero ")  # when it has caught up, pieces come in the stream's order
    for word in ("one ", "two ", "three"):
        await telling.say("a", word)
    await telling.say("b", "last")
    await reads(beside, "last")
    assert reading.take() == "one two three"


async def test_thousands_read_over_one_connection(
    telling: Telling, listener: Listener, client: Redis
) -> None:
    before = len(await client.client_list())
    names = [f"t{number}" for number in range(2000)]
    readings = [listener.open(h(name)) for name in names]
    for name in names:
        await telling.say(name, f"I am {name}")
    await asyncio.gather(*(reads(r, f"I am {n}") for r, n in zip(readings, names, strict=True)))
    assert len(await client.client_list()) <= before + 2  # one follows, one reads what was missed


async def test_another_line_breaks_the_stream(telling: Telling, listener: Listener) -> None:
    reading, fresh = listener.open(h("a")), listener.open(h("b"))
    await telling.say("a", "one ")
    await reads(reading, "one ")
    await telling.say("a", "", OTHER)
    await broken(reading)
    # Who had read nothing misses nothing.
    await telling.say("b", "", OTHER)
    await telling.say("b", "two", OTHER)
    await reads(fresh, "two")


async def test_a_break_that_was_missed_is_seen_at_the_next_piece(
    telling: Telling, listener: Listener
) -> None:
    reading = listener.open(h("a"))
    await telling.say("a", "one ")
    await reads(reading, "one ")
    await telling.say("a", "ONE ", OTHER, unheard=True)
    await telling.say("a", "TWO", OTHER)
    await broken(reading)


async def test_a_listener_rests_when_nobody_reads_and_begins_again(
    telling: Telling, listener: Listener, client: Redis
) -> None:
    reading = listener.open(h("a"))
    await telling.say("a", "one ")
    await reads(reading, "one ")
    listener.close(reading)

    async def nobody_blocks() -> bool:
        return not any("b" in one["flags"] for one in await client.client_list())

    await until_async(nobody_blocks, "the listener rests")
    await telling.say("a", "two ")
    again = listener.open(h("a"))
    await reads(again, "one two ")
    await telling.say("a", "three")
    await reads(again, "three")


async def test_it_outlives_a_cut_connection_and_a_trimmed_stream(
    telling: Telling, listener: Listener, client: Redis, farm: Farm
) -> None:
    reading = listener.open(h("a"))
    await telling.say("a", "one ")
    await reads(reading, "one ")
    for one in await client.client_list():
        if "b" in one["flags"]:  # it blocks
            await client.client_kill_filter(_id=one["id"])
    await telling.say("a", "two ")
    await client.delete(farm.keys.told("m"))
    await reads(reading, "two ")
    await telling.say("a", "three")
    await reads(reading, "three")


def test_what_is_heard_again_is_known() -> None:
    reading = Reading("x")
    reading.hear(LINE, 0, b"abc")
    reading.hear(LINE, 0, b"ab")
    reading.hear(LINE, 1, b"bcd")
    reading.hear(LINE, 4, b"")
    assert reading.take() == "abcd"


def test_what_is_heard_otherwise_breaks_the_stream() -> None:
    reading = Reading("x")
    reading.hear(LINE, 0, b"abc")
    reading.hear(LINE, 2, b"X")  # Redis has lost the c, and its worker died
    reading.hear(LINE, 3, b"Y")
    assert reading.take() == "abc"
    with pytest.raises(StreamBroken):
        reading.take()


def test_the_end_must_go_on_from_what_was_read() -> None:
    reading = Reading("x")
    reading.check("anything")
    reading.hear(LINE, 0, "ä".encode())
    reading.check("äöü")
    with pytest.raises(StreamBroken):
        reading.check("aou")
