"""What a run remembers of one conversation while a scaffold drives it: its turns, its draws, its effects."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from turnmill.draws import Draws
from turnmill.errors import TurnFailed
from turnmill.journal import Journal, effect_name
from turnmill.reply import Reply
from turnmill.results import TurnResult
from turnmill.turn import Message, Sampling, Tool, Turn

log = logging.getLogger("turnmill.run")

Value = TypeVar("Value")


class _Done(NamedTuple):
    """An effect that an earlier attempt has done, and that left something behind there."""

    key: str
    do: Callable[[], Awaitable[Any]]
    value: Any


class Session:
    """The `ask` of one conversation (scaffolds/base.py, Ask). `answer`: how a turn gets its reply; it raises TurnFailed.
    `may_do`: called before an effect is done."""

    def __init__(
        self,
        draws: Draws,
        journal: Journal,
        where: tuple[str, int],
        turn: Turn,
        answer: Callable[[Turn, Session], Awaitable[Reply]],
        may_do: Callable[[], None],
    ) -> None:
        self._draws, self._journal, self._where = draws, journal, where
        self._turn, self._answer, self._may_do = turn, answer, may_do
        self._last: tuple[str, Message | None] = ("", None)
        self._keys: set[str] = set()
        self._behind: list[_Done] = []
        self.turns: list[TurnResult] = []
        self.messages: list[Message] = []
        self.differences: list[str] = []
        """Effects that were done again, and came out differently."""
        self.ended_before = False
        """Whether the last turn had ended before this attempt."""

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        sampling: Sampling | None = None,
        tools: Sequence[Tool] | None = None,
        tool_choice: Any = None,
        response_format: dict[str, Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> Reply:
        own = sampling.model_dump(exclude_none=True) if sampling else {}
        turn = self._draws.numbered(
            Turn(
                model=self._turn.model,
                messages=list(messages),
                tools=list(tools) if tools else None,
                tool_choice=tool_choice,
                response_format=response_format,
                chat_template_kwargs=chat_template_kwargs,
                sampling=self._turn.sampling.model_copy(update=own),
            )
        )
        self.messages, self._last = list(messages), (turn.hash, None)
        self._keys.clear()
        try:
            reply = await self._answer(turn, self)
        except TurnFailed as failed:
            result = TurnResult(hash=turn.hash, sample=turn.sample, failure=failed.failure)
            self.turns.append(result)
            raise
        self._last = (turn.hash, reply.message)
        self.messages.append(reply.message)
        self.turns.append(
            TurnResult(
                hash=turn.hash,
                sample=turn.sample,
                finish_reason=reply.finish_reason,
                capped=reply.capped,
                usage=reply.usage,
            )
        )
        return reply

    async def effect(
        self, key: str, do: Callable[[], Awaitable[Value]], *, rebuild: bool = False
    ) -> Value:
        if key in self._keys:
            raise ValueError(f"the effect {key!r} is asked for twice after one turn")
        self._keys.add(key)
        name = effect_name(*self._where, *self._last, key)
        if known := await self._journal.get(name):
            value: Value = known[0]
            if rebuild:
                self._behind.append(_Done(key, do, value))
            return value
        self._may_do()
        await self._catch_up()
        written: Value = await self._journal.put(name, await do())
        return written

    async def _catch_up(self) -> None:
        """Do again what left something behind that is gone with the attempt that did it."""
        while self._behind:
            done = self._behind[0]
            if (value := await done.do()) != done.value:
                self.differences.append(done.key)
                log.warning(
                    "conversation %s: effect %s was %.200r, and is now %.200r",
                    self._where[0],
                    done.key,
                    done.value,
                    value,
                )
            del self._behind[0]
