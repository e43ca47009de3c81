"""answer_turn: the only place where a turn's ending is decided."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import Any, NamedTuple

from turnmill.errors import BadTurn, NewerRecord, RecordError
from turnmill.reply import Cap, EngineIdentity, Failure, FailureKind, Reply, Usage
from turnmill.turn import Message, Turn
from turnmill.wire import decode_turn, encode, unpack
from turnmill_worker.claim import Claim, Finish, requeue
from turnmill_worker.engines.base import (
    Answer,
    Answering,
    EngineAway,
    EngineDied,
    InvalidRequest,
    NoRoom,
    Progress,
    TurnError,
)

log = logging.getLogger("turnmill.worker")

MAX_RETRIES = 2
RETRY_AFTER = (1.0, 5.0)
"""Seconds before each retry of a turn on which the engine failed."""
NOT_MINE_AFTER = 10.0
"""Seconds until a turn for another revision, or of a newer wire version, is offered again."""
LARGE_BODY = 256 << 10
"""Bytes; a larger body is decoded in a thread, so that the worker's loop is never blocked."""


class _Try(NamedTuple):
    """This try of a turn, and what is made of it if it ends without an answer."""

    claim: Claim
    identity: EngineIdentity
    worker: str
    progress: Progress

    def again_or_fail(self, text: str) -> Finish:
        retries = sum(entry.outcome == "retry" for entry in self.claim.earlier)
        if retries < MAX_RETRIES:
            log.warning("turn %s: %s; it is tried again", self.claim.hash[:12], text)
            return requeue(self.claim, "retry", RETRY_AFTER[retries])
        return self.fail("engine_error", text)

    def fail(self, kind: FailureKind, text: str) -> Finish:
        hash, token = self.claim.hash, self.claim.token
        failure = Failure(hash=hash, kind=kind, text=text, tries=len(self.claim.earlier) + 1)
        return Finish(hash, token, "fail", kind, encode(failure), self.trace("failed", Usage()))

    def trace(self, outcome: str, usage: Usage) -> bytes:
        """The trace as it is stored: `encode(Trace(...))`, without the model."""
        claim, progress = self.claim, self.progress
        trace = {
            "hash": claim.hash,
            "worker": self.worker,
            "outcome": outcome,
            "earlier": claim.earlier,
            "engine": self.identity.fields,
            "request": progress.request,
            "times": progress.times(claim.enqueued, claim.claimed),
            "cached_tokens": usage.cached_tokens,
            "resumed_at": progress.resumed_at,
        }
        for name in ("request", "resumed_at"):
            if not trace[name]:
                del trace[name]
        return encode(trace)


async def answer_turn(context: dict[str, Any], claim: Claim, progress: Progress) -> Finish:
    """The arq job: answer one claimed turn, and say how it ended. `context` holds the `engine` and the id
    of the `worker`. Raises CancelledError, EngineDied and EngineAway."""
    engine: Answering = context["engine"]
    this = _Try(claim, engine.identity, context["worker"], progress)
    try:
        if len(claim.body) > LARGE_BODY:
            turn = await asyncio.to_thread(read_turn, claim)
        else:
            turn = read_turn(claim)
    except NewerRecord as error:
        log.warning("turn %s left to a newer worker: %s", claim.hash[:12], error)
        return requeue(claim, "newer", NOT_MINE_AFTER)
    except BadTurn as error:
        return this.fail("invalid_request", str(error))
    except RecordError as error:
        return this.fail("unreadable", str(error))

    if turn.model != engine.served_name:
        text = f"model {turn.model!r} was put into the queue of {engine.served_name!r}"
        return this.fail("invalid_request", text)
    if turn.revision is not None and turn.revision != engine.identity.revision:
        return requeue(claim, "revision", NOT_MINE_AFTER)

    try:
        try:
            reply = _reply(claim, await engine.answer(turn, claim.rid, progress))
        except NoRoom as error:
            progress.now_rendered({"endpoint": None, "prompt_tokens": error.prompt_tokens})
            reply = _capped_before(claim, error)
        record = encode(reply)
        progress.reply = reply
    except InvalidRequest as error:
        return this.fail("invalid_request", str(error))
    except (EngineDied, EngineAway):
        raise
    except TurnError as error:
        return this.again_or_fail(str(error))
    except Exception as error:
        log.exception("turn %s", claim.hash[:12])
        return this.again_or_fail(repr(error))
    trace = this.trace("capped" if reply.capped else "completed", reply.usage)
    return Finish(claim.hash, claim.token, "ok", "", record, trace)


def read_turn(claim: Claim) -> Turn:
    """The turn in a claim, if it is the one that its hash names. Raises RecordError or BadTurn."""
    turn = decode_turn(claim.body)
    # The canonical body is what was hashed; only other writers' bodies need to be made canonical again.
    if hashlib.sha256(unpack(claim.body)).hexdigest() != claim.hash and turn.hash != claim.hash:
        raise RecordError(f"the stored body is that of turn {turn.hash}")
    return turn


def _reply(claim: Claim, answer: Answer) -> Reply:
    capped: Cap | None = answer.limited_by if answer.finish == "length" else None
    return Reply.model_validate(
        {
            "hash": claim.hash,
            "message": answer.message,
            "finish_reason": answer.finish,
            "capped": capped,
            "limit": answer.limit if capped else None,
            "usage": answer.usage,
            "logprobs": answer.logprobs,
        }
    )


def _capped_before(claim: Claim, error: NoRoom) -> Reply:
    return Reply(
        hash=claim.hash,
        message=Message(role="assistant", content=""),
        finish_reason="length",
        capped="context",
        limit=error.limit,
        usage=Usage(prompt_tokens=error.prompt_tokens),
    )
