"""How the engine tests ask: turns in one line, one call for an answer, and waiting for a state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from turnmill.turn import Turn
from turnmill_worker.engines.base import Answer, Engine, Progress


def turn(*messages: str | dict[str, Any], **fields: Any) -> Turn:
    """A greedy turn of 8 tokens at most. A string is a user's message; the fields of Turn are taken
    as such, all others are sampling."""
    own = {name: fields.pop(name) for name in Turn.model_fields if name in fields}
    said = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
    sampling = {"temperature": 0, "max_tokens": 8, **fields}
    return Turn.from_body(
        {"model": "any", **({"messages": said} if said else {}), "sampling": sampling, **own}
    )


async def ask(engine: Engine, asked: Turn, progress: Progress | None = None) -> Answer:
    return await engine.answer(asked, new_rid(), progress or Progress())


def new_rid() -> str:
    return uuid4().hex


async def until(state: Callable[[], object], seconds: float = 60) -> None:
    """Waits until `state` is true."""
    async with asyncio.timeout(seconds):
        while not state():  # noqa: ASYNC110 - engines have no event for it
            await asyncio.sleep(0.001)
