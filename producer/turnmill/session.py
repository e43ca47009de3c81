"""What a run remembers of one conversation while a scaffold drives it: its turns, its draws, its effects."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from turnmill.branches import Branch
from turnmill.draws import Draws
from turnmill.errors import BadTurn, RecordError, TurnFailed, UsageError
from turnmill.journal import Journal, effect_name, is_same
from turnmill.reply import Reply
from turnmill.results import TurnResult
from turnmill.tasks import end_tasks
from turnmill.turn import Message, Sampling, Tool, Turn, explain

log = logging.getLogger("turnmill.run")

Value = TypeVar("Value")


class Stopped(BaseException):
    """Nothing more is asked; the conversation stays where it is and goes on in the next attempt. No scaffold's
    `except Exception` is to hold it up."""


class _Effect(NamedTuple):
    key: str
    name: str
    do: Callable[[], Awaitable[Any]]


class Session:
    """The `ask` of one conversation (scaffolds/base.py, Ask). `where`: id, epoch and digest of its item. `answer`: how a
    turn gets its reply; it raises TurnFailed, or Stopped. `may_do`: called before an effect is done; it raises Stopped.
    """

    def __init__(
        self,
        draws: Draws,
        journal: Journal,
        where: tuple[str, int, str],
        turn: Turn,
        answer: Callable[[Turn, Session], Awaitable[Reply]],
        may_do: Callable[[], None],
    ) -> None:
        self._branch = Branch(draws)
        self._journal, self._where = journal, where
        self._turn, self._answer, self._may_do = turn, answer, may_do
        self._named: set[str] = set()
        self._behind: list[tuple[_Effect, Any]] = []
        """What an earlier attempt has done, and was: it left something behind there."""
        self._catching_up = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._over = False
        self.turns: list[TurnResult] = []
        self.messages: list[Message] = []
        self.differences: list[str] = []
        """Effects that were done again, and came out differently."""
        self.ended_before = False
        """Whether the last turn had ended before this attempt."""
        self.stopped = False
        """Whether the scaffold was stopped on its way, whatever it made of that."""
        self.cancelled: TurnFailed | None = None
        """That the last turn was cancelled, whatever the scaffold made of that."""

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
        try:
            own = Sampling.model_validate(sampling or {}).model_dump(exclude_none=True)
            turn = Turn(
                model=self._turn.model,
                messages=list(messages),
                tools=list(tools) if tools else None,
                tool_choice=tool_choice,
                response_format=response_format,
                chat_template_kwargs=chat_template_kwargs,
                sampling=self._turn.sampling.model_copy(update=own),
            )
        except ValidationError as error:
            raise BadTurn(f"cannot be asked: {explain(error)}") from None
        branch = self._branch.here
        turn = branch.draws.numbered(turn)
        if branch.effect is None:
            self.messages = list(turn.messages)
        async with self._going():
            reply = await self._answered(turn, branch)
        if branch.effect is None:
            self.messages = [*turn.messages, reply.message]
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
        if not isinstance(key, str):
            raise UsageError(f"the key of an effect must be a string: {key!r:.200}")
        branch = self._branch.here
        if branch.effect is not None:
            raise UsageError(f"the effect {key!r} is within another, {branch.effect!r}")
        name = effect_name(*self._where, branch.told, key)
        if name in self._named:
            raise UsageError(f"the effect {key!r} is asked for twice after one turn")
        self._named.add(name)
        one = _Effect(key, name, do)
        try:
            async with self._going():
                value: Value = await self._effected(one, branch, rebuild)
        except BaseException:
            self._named.discard(name)  # it may be tried again
            raise
        return value

    async def close(self) -> None:
        """The conversation has ended; tasks that still ask for it are ended."""
        self._over = True
        await end_tasks(self._tasks)

    @asynccontextmanager
    async def _going(self) -> AsyncIterator[None]:
        """Around what a task asks or does. Raises Stopped if that is over."""
        task = asyncio.current_task()
        assert task is not None
        first = task not in self._tasks  # else it asks within an effect
        self._tasks.add(task)
        try:
            if self._over:
                raise Stopped
            yield
        except Stopped:
            self.stopped |= not self._over
            # A scaffold that goes on all the same is not to hold up all others.
            await asyncio.sleep(0)
            raise
        finally:
            if first:
                self._tasks.discard(task)

    async def _answered(self, turn: Turn, branch: Branch) -> Reply:
        try:
            reply = await self._answer(turn, self)
        except TurnFailed as failed:
            self.cancelled = failed if failed.failure.kind == "cancelled" else None
            result = TurnResult(hash=turn.hash, sample=turn.sample, failure=failed.failure)
            self.turns.append(result)
            branch.tell(turn, None)
            raise
        self.cancelled = None
        branch.tell(turn, reply)
        return reply

    async def _effected(self, one: _Effect, branch: Branch, rebuild: bool) -> Any:
        try:
            known = await self._journal.get(one.name)
        except RecordError as error:
            raise RecordError(f"effect {one.key!r}: {error}") from None
        if known:
            if rebuild:
                self._behind.append((one, known[0]))
            return known[0]
        self._may_do()
        async with self._catching_up:
            await self._catch_up(branch)
        value = await self._do(one, branch)
        with _named(one):
            return await self._journal.put(one.name, value)

    async def _catch_up(self, branch: Branch) -> None:
        """Do again what left something behind that is gone with the attempt that did it."""
        while self._behind:
            one, before = self._behind[0]
            value = await self._do(one, branch)
            with _named(one):
                alike = is_same(value, before)
            if not alike:
                self.differences.append(one.key)
                log.warning(
                    "conversation %s: effect %s was %.200r, and is now %.200r",
                    self._where[0],
                    one.key,
                    before,
                    value,
                )
            del self._behind[0]

    async def _do(self, one: _Effect, branch: Branch) -> Any:
        with branch.within(one.key, one.name):
            doing: Any = one.do()
            if not inspect.isawaitable(doing):
                raise UsageError(
                    f"effect {one.key!r} is not async: it returned {type(doing).__name__}"
                )
            return await doing


@contextmanager
def _named(one: _Effect) -> Iterator[None]:
    """Says which effect it is whose value cannot be written down."""
    try:
        yield
    except ValueError as error:
        raise UsageError(f"effect {one.key!r} {error}") from None
