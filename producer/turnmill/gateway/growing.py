"""Answers while they grow."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from turnmill.client import Client
from turnmill.reply import Reply
from turnmill.store import Ending
from turnmill.turn import Turn


@dataclass(frozen=True)
class Delta:
    """A piece of an answer's text."""

    content: str


async def growing(client: Client, turn: Turn, *, going: bool) -> AsyncIterator[Delta | Ending]:
    """Pieces of the answer's text in order, and how the turn ended, always last."""
    _, ending = await client.ask_stating(turn, going=going, fresh=False)
    content = ending.message.content if isinstance(ending, Reply) else None
    if content and isinstance(content, str):
        yield Delta(content)
    yield ending
