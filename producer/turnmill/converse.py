"""One conversation, from its start to a line of `replies.jsonl`, whatever its scaffold does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from turnmill.draws import Draws
from turnmill.errors import RecordError, TurnFailed, TurnmillError, UsageError
from turnmill.journal import Journal
from turnmill.lines import Item
from turnmill.reply import Reply
from turnmill.results import ConversationResult, Outcome, writable
from turnmill.run_settings import RunSettings
from turnmill.scaffolds.base import Ended, Scaffold
from turnmill.session import Session, Stopped
from turnmill.turn import Turn, explain

log = logging.getLogger("turnmill.run")


@dataclass(frozen=True)
class Conversed:
    """How a conversation ended. `failed_now`: it failed, and not because of what was stored before."""

    result: ConversationResult
    failed_now: bool


def open_session(
    settings: RunSettings,
    journal: Journal,
    item: Item,
    epoch: int,
    answer: Callable[[Turn, Session], Awaitable[Reply]],
    may_do: Callable[[], None],
) -> Session:
    """What a run's scaffold asks through in one conversation. `answer`, `may_do`: as for Session."""
    return Session(
        Draws(settings.name if settings.reuse == "run" else "", item.id, epoch, settings.seed),
        journal,
        (item.id, epoch, item.digest),
        Turn.model_construct(model=settings.model, sampling=settings.sampling),
        answer,
        may_do,
    )


async def converse(
    scaffold: Scaffold[Any], item: Item, epoch: int, session: Session
) -> Conversed | None:
    """Drive one conversation to its end; None if it was stopped on its way. What it leaves running is ended with it. Raises
    what ends a run as well: errors of Redis and of files."""
    ended: Ended | BaseException
    try:
        # In a task of its own: a scaffold that cancels itself is told from a run that ends.
        ended = await asyncio.create_task(_drive(scaffold, item, session))
    except BaseException as raised:
        ended = _foremost(raised)
        if _ends_the_run(ended):
            raise
    finally:
        await session.close()
    # Whatever the scaffold made of it.
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError  # the run ends, and the next attempt goes on
    if session.cancelled is not None:
        ended = session.cancelled
    elif session.stopped or isinstance(ended, Stopped):
        return None
    if isinstance(ended, BaseException):
        return _broken_off(ended, item, epoch, session)
    outcome: Outcome = "failed" if ended.failed else "capped" if ended.capped else "completed"
    try:
        return Conversed(_result(item, epoch, session, ended, outcome), outcome == "failed")
    except ValueError as error:
        what = explain(error) if isinstance(error, ValidationError) else str(error)
        return _broken_off(UsageError(f"the scaffold's Ended: {what}"), item, epoch, session)


async def _drive(scaffold: Scaffold[Any], item: Item, session: Session) -> Ended:
    try:
        end: Any = await scaffold.drive(item, session)
    except SystemExit as exit:  # leaving a task, it ends the process
        raise RuntimeError(f"SystemExit: {exit.code}") from exit
    if not isinstance(end, Ended):
        raise UsageError(f"the scaffold returned {type(end).__name__}, and not Ended")
    return end


def _broken_off(error: BaseException, item: Item, epoch: int, session: Session) -> Conversed:
    """A conversation that ended with an error."""
    outcome: Outcome = "failed"
    failed_now, text = True, str(error)
    if isinstance(error, TurnFailed):
        outcome = "cancelled" if error.failure.kind == "cancelled" else "failed"
        failed_now = outcome == "failed" and not session.ended_before
    elif isinstance(error, RecordError):  # as it was before this attempt
        failed_now = False
    elif not isinstance(error, UsageError):
        # A scaffold is anybody's code: it ends one conversation, not the run.
        log.warning("conversation %s: the scaffold failed", item.id, exc_info=error)
        text = f"{type(error).__name__}: {error}"
    end = Ended(session.messages, failed=text)
    return Conversed(_result(item, epoch, session, end, outcome), failed_now)


def _result(
    item: Item, epoch: int, session: Session, end: Ended, outcome: Outcome
) -> ConversationResult:
    """Raises ValueError if the scaffold's part of it cannot be written down."""
    capped = end.capped
    if capped is None and any(turn.capped == "output" for turn in session.turns):
        capped = "output"
    details: Any = end.details
    if session.differences:
        details = {**(details or {}), "done_again_differently": session.differences}
    fields = {
        "id": item.id,
        "epoch": epoch,
        "outcome": outcome,
        "capped": capped,
        "messages": end.messages,
        "turns": session.turns,
        "error": end.failed,
        "ending": end.ending,
        "score": end.score,
        "details": details or None,
    }
    return writable(ConversationResult.model_validate(fields))


def _ends_the_run(error: BaseException) -> bool:
    if isinstance(error, TurnmillError):
        return not isinstance(error, TurnFailed | RecordError | UsageError)
    return isinstance(error, KeyboardInterrupt)


def _foremost(error: BaseException) -> BaseException:
    """Of a group of errors, as tasks that go on at once end with, the one that says most."""

    def rank(one: BaseException) -> int:
        if isinstance(one, Stopped):
            return 0
        return 1 if _ends_the_run(one) else 2 if isinstance(one, TurnmillError) else 3

    return min(_leaves(error), key=rank)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error
