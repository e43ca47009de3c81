"""Effects are found again by what was told before them, whatever goes on at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from turnmill import Client, Message, Reply, Sampling
from turnmill.draws import Draws
from turnmill.errors import RecordError, UsageError
from turnmill.journal import Journal
from turnmill.session import Session
from turnmill.settings import Farm
from turnmill.turn import Turn

Open = Callable[..., Session]


@pytest.fixture
async def journal(farm: Farm) -> AsyncIterator[Journal]:
    async with Client(farm.url, namespace=farm.namespace, run="run") as client:
        yield Journal(client, "run")


@pytest.fixture
def attempt(journal: Journal) -> Open:
    """Sessions of one conversation, one for each attempt. A turn is answered with its own text and `answers`; one of
    which `slow` is a part, after all others that were asked with it."""

    def open_one(slow: str = "-", answers: str = "", digest: str = "d") -> Session:
        async def answer(turn: Turn, session: Session) -> Reply:
            text = str(turn.messages[-1].content)
            for _ in range(200 if slow in text else 1):
                await asyncio.sleep(0)
            message = Message(role="assistant", content=text + answers)
            return Reply(hash=turn.hash, message=message, finish_reason="stop")

        turn = Turn.model_construct(model="m", sampling=Sampling())
        draws = Draws("run", "c", 0, None)
        return Session(draws, journal, ("c", 0, digest), turn, answer, lambda: None)

    return open_one


def said(text: str) -> list[Message]:
    return [Message(role="user", content=text)]


class World:
    """What effects do here: `done` is all of it, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def doing(self, what: str, value: Any = None) -> Callable[[], Any]:
        async def do() -> Any:
            await asyncio.sleep(0)
            self.done.append(what)
            return what if value is None else value

        return do


async def both(session: Session, world: World) -> list[str]:
    """Two tasks at once, whose effects have the same keys; and one effect of what they came to."""

    async def one(name: str) -> list[str]:
        seen = []
        for step in range(3):
            await session(said(f"{name} {step}"))
            seen.append(await session.effect("look", world.doing(f"{name} saw {step}")))
        return seen

    a, b = await asyncio.gather(one("a"), asyncio.wait_for(one("b"), 30))
    return [*a, *b, await session.effect("look", world.doing("the end"))]


async def test_tasks_at_once_are_told_their_own_effects(attempt: Open) -> None:
    world = World()
    first = await both(attempt(slow="a"), world)
    assert len(world.done) == 7
    assert first == [*(f"{n} saw {k}" for n in "ab" for k in range(3)), "the end"]
    for slow in ("b", "a", "b 1", "a 0", "-"):
        assert await both(attempt(slow=slow), world) == first
    assert len(world.done) == 7, "none is done again, whoever is quicker"


async def test_steps_with_a_timeout_each(attempt: Open) -> None:
    """In Python 3.11, `wait_for` makes a task of each ask and each effect."""
    world = World()

    async def drive(session: Session) -> None:
        await session.effect("begin", world.doing("begin"))
        for step in range(3):
            await asyncio.wait_for(session(said(f"step {step}")), 30)
            await asyncio.wait_for(session.effect("look", world.doing(f"look {step}")), 30)
            await session.effect("note", world.doing(f"note {step}"))

    await drive(attempt())
    assert len(world.done) == 7
    await drive(attempt())
    assert len(world.done) == 7


async def test_another_answer_or_another_item_has_other_effects(attempt: Open) -> None:
    world = World()

    async def look(session: Session) -> str:
        await session(said("x"))
        return await session.effect("look", world.doing(f"look {len(world.done)}"))

    assert await look(attempt()) == "look 0"
    assert await look(attempt()) == "look 0"
    assert await look(attempt(answers="!")) == "look 1"
    assert await look(attempt(digest="e")) == "look 2"


async def test_what_is_rebuilt_at_once_is_rebuilt_once(attempt: Open) -> None:
    world = World()

    async def drive(session: Session, more: bool) -> None:
        for key in ("1", "2", "3"):
            await session.effect(key, world.doing(key, value=(key,)), rebuild=True)
        if more:
            new = (session.effect(f"new {key}", world.doing("new")) for key in range(4))
            await asyncio.gather(*new)

    await drive(attempt(), more=False)
    world.done.clear()
    again = attempt()
    await drive(again, more=True)
    assert world.done == ["1", "2", "3", *["new"] * 4]
    assert again.differences == [], "a tuple is written down as a list, which is no difference"


async def test_turns_of_an_effect_change_nothing_after_it(attempt: Open) -> None:
    world = World()

    async def drive(session: Session) -> tuple[list[str], str]:
        async def agent() -> str:
            reply = await session(said("x"))
            world.done.append("agent")
            return str(reply.message.content)

        await session.effect("agent", agent)
        await session(said("x"))
        await session.effect("look", world.doing("look"))
        return world.done, session.turns[-1].hash

    done, last = await drive(attempt())
    assert done == ["agent", "look"]
    assert await drive(attempt()) == (done, last), "the same draw is asked for"


async def test_an_entry_that_cannot_be_read_says_which(attempt: Open, journal: Journal) -> None:
    world = World()
    await attempt().effect("look", world.doing("look"))
    (name,) = await journal._redis.hkeys(journal._key)  # type: ignore[misc]
    for garbage in (b"Zgarbage", b"{", b"\xff"):
        await journal._redis.hset(journal._key, name, garbage)  # type: ignore[arg-type,misc]
        with pytest.raises(RecordError, match="effect 'look': the journal's entry"):
            await attempt().effect("look", world.doing("look"))


async def test_what_is_too_large_is_refused(attempt: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnmill.journal.LARGEST", 3 << 20)
    with pytest.raises(UsageError, match="effect 'look' returned 4 MB of JSON, and 3 is the most"):
        await attempt().effect("look", World().doing("look", "x" * (4 << 20)))
