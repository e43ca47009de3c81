"""What a scaffold is: an async function that drives one conversation, and asks for turns.

It is written as if it called a model directly. Queue, resuming, draws and failures are not its business:
it keeps no state worth saving, and run again from the start it is answered from the store, and told from the
journal what its effects were.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from turnmill.canonical import canonical
from turnmill.lines import Item, ItemT, Loaded, check_id, read_lines
from turnmill.reply import Reply
from turnmill.results import ConversationCap
from turnmill.turn import Message, Sampling, Tool

Value = TypeVar("Value")


class Ask(Protocol):
    """Asks for one assistant message. Sampling fields given here go over the run's. A turn that fails
    raises TurnFailed, which ends the conversation as failed; a scaffold need not catch it."""

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        sampling: Sampling | None = None,
        tools: Sequence[Tool] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        response_format: dict[str, Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> Reply: ...

    async def effect(
        self, key: str, do: Callable[[], Awaitable[Value]], *, rebuild: bool = False
    ) -> Value:
        """What `do` returned, which must be JSON: a command that was run, a tool, a clock, anything that is not a turn.

        It is done once and written down before it is returned. Run again, the conversation gets what was written
        down, and nothing is done; but with `rebuild`, what was done leaves something behind (a file in a sandbox) that later
        effects need: then it is done again before the first effect that was not yet written down, and what
        comes out differently is reported. `key` is unique among the effects between two turns. An effect that raises
        is not written down. One that a crash met in the middle is done again.
        """
        ...


@dataclass(frozen=True)
class Ended:
    """How a conversation ended, as its scaffold sees it.

    `messages`: all of them. `capped`: the cap that ended it. `ending`: the scaffold's own word for how it ended.
    `score`: how good it was, usually from 0 to 1. `details`: what else is worth writing down, as JSON. `failed`: why
    it failed, if it did.
    """

    messages: Sequence[Message]
    capped: ConversationCap | None = None
    ending: str | None = None
    score: float | None = None
    details: Mapping[str, Any] | None = None
    failed: str | None = None


@dataclass(frozen=True)
class Line:
    """An input line as it is: an object with an `id`, and whatever else the scaffold reads in `fields`."""

    id: str
    fields: Mapping[str, Any] = field(hash=False)

    @property
    def digest(self) -> str:
        """64 hex digits: SHA-256 over the canonical JSON."""
        return hashlib.sha256(canonical(dict(self.fields)).hashed).hexdigest()


def read_plain(source: str, skip_bad: bool = False) -> Loaded[Line]:
    """Any file of JSON lines with an `id` each, a string or an integer. Raises BadInput."""
    return read_lines(source, plain_line, skip_bad)


def plain_line(fields: dict[str, Any]) -> Line:
    """Raises ValueError for an object without an `id`."""
    if "id" not in fields:
        raise ValueError("id: is missing")
    try:
        return Line(check_id(fields["id"]), fields)
    except ValueError as error:
        raise ValueError(f"id: {error}") from None


@dataclass(frozen=True)
class Scaffold(Generic[ItemT]):
    """`drive` drives one conversation about an item. `read` makes items of what stands for FILE in `turnmill run FILE`
    (the second argument: leave out what is bad), and raises BadInput or UsageError for what is none.
    `options`: what changes its answers, and is part of the run's manifest.
    """

    drive: Callable[[ItemT, Ask], Awaitable[Ended]]
    read: Callable[[str, bool], Loaded[ItemT]] = read_plain  # type: ignore[assignment]
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)


__all__ = ["Ask", "Ended", "Item", "Line", "Loaded", "Scaffold", "read_lines", "read_plain"]
