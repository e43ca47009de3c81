"""Scaffolds that are wrong, each in its own way: an item says which, in `how`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from turnmill import Message, Sampling
from turnmill.errors import TurnFailed
from turnmill.scaffolds import Ask, Ended, Line, Scaffold

Drive = Callable[[Ask], Awaitable[Any]]
ALL: dict[str, Drive] = {}


def one(drive: Drive) -> Drive:
    ALL[drive.__name__] = drive
    return drive


def said(text: str) -> list[Message]:
    return [Message(role="user", content=text)]


def ending(**fields: Any) -> Drive:
    async def drive(ask: Ask) -> Ended:
        return Ended(**{"messages": [], **fields})

    return drive


circle: dict[str, Any] = {}
circle["again"] = circle
for name, fields in {
    "no_messages": {"messages": None},
    "capped": {"capped": "nonsense"},
    "nan": {"score": float("nan")},
    "score": {"score": "high"},
    "ending": {"ending": 7},
    "details": {"details": [1]},
    "bytes": {"details": {"x": b"\xff"}},
    "object": {"details": {"x": object()}},
    "circle": {"details": circle},
    "half_a_pair": {"details": {"x": "\udcff"}, "ending": "\udcff"},
}.items():
    ALL[name] = ending(**fields)


@one
async def fine(ask: Ask) -> Ended:
    reply = await ask(said("fine"))
    return Ended([*said("fine"), reply.message], ending="fine")


@one
async def nothing(ask: Ask) -> None:
    await ask(said("x"))


@one
async def exits(ask: Ask) -> None:
    sys.exit(0)


@one
async def ends_as_if_done(ask: Ask) -> Ended:
    try:
        return await fine(ask)
    except BaseException as error:
        return Ended(said("fine"), ending=f"gave up: {type(error).__name__}")


@one
async def cancels_itself(ask: Ask) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(60)


@one
async def own_base_exception(ask: Ask) -> None:
    class Own(BaseException):
        pass

    raise Own("mine")


@one
async def value(ask: Ask) -> None:
    int("seven")


@one
async def raises_half_a_pair(ask: Ask) -> None:
    raise RuntimeError("file \udcff")


@one
async def asks_nothing(ask: Ask) -> None:
    await ask([])


@one
async def group(ask: Ask) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ask(said("REFUSED")))
        tasks.create_task(ask(said("fine")))


@one
async def leaves_a_task(ask: Ask) -> Ended:
    async def go_on() -> None:
        for step in range(1_000_000):
            await ask(said(f"step {step}"))

    task = asyncio.create_task(go_on())
    await ask(said("x"))
    return Ended([], ending="left" if not task.done() else None)


def doing(made: Any, key: Any = "look") -> Drive:
    async def drive(ask: Ask) -> Ended:
        async def do() -> Any:
            return made

        return Ended([], details={"seen": await ask.effect(key, do)})

    return drive


ALL["effect_object"] = doing(object())
ALL["effect_key"] = doing(1, key=None)
ALL["effect_nan"] = doing([1, float("nan")])


@one
async def effect_sync(ask: Ask) -> None:
    await ask.effect("look", lambda: 7)  # type: ignore[arg-type,return-value]


@one
async def effect_twice(ask: Ask) -> None:
    async def do() -> int:
        return 7

    await ask.effect("look", do)
    await ask.effect("look", do)


@one
async def effect_in_effect(ask: Ask) -> None:
    async def do() -> int:
        return await ask.effect("inner", do)

    await ask.effect("outer", do)


@one
async def tries_again(ask: Ask) -> Ended:
    tries = 0

    async def do() -> int:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise TimeoutError
        return tries

    while True:
        try:
            return Ended([], details={"tries": await ask.effect("slow", do)})
        except TimeoutError:
            pass


@one
async def same_turn(ask: Ask) -> Ended:
    """The world goes on between two turns that are the same."""
    seen: list[int] = []

    async def do() -> int:
        return len(seen)

    for _ in range(3):
        await ask(said("same"), sampling=Sampling(temperature=0))
        seen.append(await ask.effect("look", do))
    return Ended([], details={"seen": seen})


@one
async def blocks(ask: Ask) -> None:
    """Ends neither by itself nor by being cancelled, and nothing else goes on meanwhile."""
    (Path.cwd() / "blocks").touch()
    time.sleep(1000)  # noqa: ASYNC251


@one
async def never_gives_up(ask: Ask) -> None:
    """Holds that a turn failed for something that passes, and asks again at once."""
    while True:
        with suppress(TurnFailed):
            await ask(said("x"))


async def drive(item: Line, ask: Ask) -> Any:
    return await ALL[item.fields["how"]](ask)


hostile = Scaffold(drive)
