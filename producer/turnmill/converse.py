"""One conversation, from its start to a line of `replies.jsonl`, whatever its scaffold does."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from turnmill.draws import Draws
from turnmill.errors import RecordError, TurnFailed, TurnmillError, UsageError
from turnmill.journal import Journal
from turnmill.lines import Item
from turnmill.reply import Reply
from turnmill.results import ConversationResult, Outcome
from turnmill.run_settings import RunSettings
from turnmill.scaffolds.base import Ended, Scaffold
from turnmill.session import Session
from turnmill.turn import Turn

log = logging.getLogger("turnmill.run")


class Stopped(BaseException):
    """Nothing more is asked; the conversation stays where it is and goes on in the next attempt. No scaffold's
    `except Exception` is to hold it up."""


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
        (item.id, epoch),
        Turn.model_construct(model=settings.model, sampling=settings.sampling),
        answer,
        may_do,
    )


async def converse(
    scaffold: Scaffold[Any], item: Item, epoch: int, session: Session
) -> Conversed | None:
    """Drive one conversation to its end; None if it was stopped on its way. Raises what ends a run as well: errors of
    Redis and of files."""
    failed_now = False
    outcome: Outcome
    try:
        end = await scaffold.drive(item, session)
        outcome = "failed" if end.failed else "capped" if end.capped else "completed"
        failed_now = outcome == "failed"
    except Stopped:
        return None
    except TurnFailed as failed:
        end = Ended(session.messages, failed=str(failed))
        outcome = "cancelled" if failed.failure.kind == "cancelled" else "failed"
        failed_now = outcome == "failed" and not session.ended_before
    except RecordError as unreadable:  # as it was before this attempt
        end, outcome = Ended(session.messages, failed=str(unreadable)), "failed"
    except (UsageError, ValueError) as wrong:
        end, outcome = Ended(session.messages, failed=str(wrong)), "failed"
        failed_now = True
    except TurnmillError:
        raise
    except (
        Exception
    ) as wrong:  # a scaffold is anybody's code: it ends one conversation, not the run
        log.warning("conversation %s: the scaffold failed", item.id, exc_info=wrong)
        text = f"{type(wrong).__name__}: {wrong}"
        end, outcome = Ended(session.messages, failed=text), "failed"
        failed_now = True
    capped = end.capped
    if capped is None and any(turn.capped == "output" for turn in session.turns):
        capped = "output"
    result = ConversationResult(
        id=item.id,
        epoch=epoch,
        outcome=outcome,
        capped=capped,
        messages=list(end.messages),
        turns=session.turns,
        error=end.failed,
        ending=end.ending,
        score=end.score,
        details=_details(end, session),
    )
    return Conversed(result, failed_now)


def _details(end: Ended, session: Session) -> dict[str, Any] | None:
    details = dict(end.details or {})
    if session.differences:
        details["done_again_differently"] = session.differences
    return details or None
