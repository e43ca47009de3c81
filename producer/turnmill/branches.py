"""Which effect of a conversation is which, also where it goes on in several tasks at once.

An effect is named after what was told before it. In a scaffold of one task that is all turns and their replies. A task that the
scaffold starts is a branch: what it is told is its own, so that its effects are called the same whichever
branch is quicker; who started it knows of it, too.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from turnmill.draws import Draws
from turnmill.reply import Reply
from turnmill.turn import Turn


class Branch:
    """What one task was told. `effect`: the key of the effect that it is part of; what that asks is told to nobody else,
    since later attempts do not ask it."""

    def __init__(
        self,
        draws: Draws,
        parent: Branch | None = None,
        effect: str | None = None,
        told: int = 0,
    ) -> None:
        self.draws, self.effect = draws, effect
        self._parent = parent
        self._root: Branch = parent._root if parent else self
        self._task = asyncio.current_task()
        self._told = self._begun_from = told
        self._begun: list[asyncio.Task[Any] | None] = []

    @property
    def here(self) -> Branch:
        """The branch of this task, in the conversation of which this one is the first."""
        at = _here.get(None)
        if at is None or at._root is not self:
            at = self
        if at._task is not asyncio.current_task():
            at = Branch(at.draws, at, at.effect, at._next_begins_from())
            _here.set(at)
        return at

    @property
    def told(self) -> str:
        """Digest of the turns and replies so far, in whatever order they came."""
        return f"{self._told:x}"

    def tell(self, turn: Turn, reply: Reply | None) -> None:
        """A turn has ended, without a reply if it failed. Asked anew, it may be answered otherwise, and then other effects
        follow."""
        said = "" if reply is None else reply.message.model_dump_json(exclude_none=True)
        text = f"{turn.hash} {said}"
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16])
        self._begun_from += number
        at: Branch | None = self
        while at is not None and at.effect == self.effect:
            at._told += number
            at = at._parent

    def _next_begins_from(self) -> int:
        """What a branch of this one was told before it began. Of several at once that is the same for all: which of the
        others is further, or done, when one begins, differs from attempt to attempt."""
        if all(task is None or task.done() for task in self._begun):
            self._begun.clear()
            self._begun_from = self._told
        self._begun.append(asyncio.current_task())
        return self._begun_from

    @contextmanager
    def within(self, effect: str, name: str) -> Iterator[None]:
        """Inside the block, what this task does is part of an effect."""
        inner = Branch(self.draws.within(name), self, effect)
        token = _here.set(inner)
        try:
            yield
        finally:
            _here.reset(token)


_here: ContextVar[Branch] = ContextVar("turnmill_branch")
