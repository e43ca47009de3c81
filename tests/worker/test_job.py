"""answer_turn: how a turn ends."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import pytest
from pydantic import BaseModel

from turnmill.reply import EngineIdentity, Failure, Reply, Trace, Usage
from turnmill.turn import Turn
from turnmill.wire import decode, encode, encode_turn
from turnmill_worker.claim import Claim, Company, Finish
from turnmill_worker.engines.base import (
    Answer,
    Capacity,
    EngineDied,
    InvalidRequest,
    NoRoom,
    Progress,
    TurnError,
)
from turnmill_worker.job import LARGE_BODY, NOT_MINE_AFTER, answer_turn

Model = TypeVar("Model", bound=BaseModel)
IDENTITY = EngineIdentity(engine="scripted", version="1", model="path", revision="r1")


class Scripted:
    """An engine that gives this answer, or raises this."""

    identity = IDENTITY
    served_name = "m"

    def __init__(self, answer: Answer | BaseException) -> None:
        self._answer = answer
        self.asked: list[tuple[Turn, str]] = []

    async def answer(self, turn: Turn, rid: str, progress: Progress) -> Answer:
        self.asked.append((turn, rid))
        progress.now_rendered({"endpoint": "scripted", "prompt_tokens": 7})
        progress.now_sent()
        if isinstance(self._answer, BaseException):
            raise self._answer
        progress.moved(self._answer.usage.completion_tokens)
        return self._answer

    async def abort(self, rid: str) -> None: ...

    async def healthy(self) -> bool:
        return True

    def capacity(self) -> Capacity:
        return Capacity(1, 100)

    def running(self) -> int:
        return 0

    def close(self) -> None: ...


def answered(finish: Any = "stop", message: Any = None, **fields: Any) -> Answer:
    message = message or {"role": "assistant", "content": "Hello"}
    return Answer(message, finish, Usage(prompt_tokens=7, completion_tokens=3), **fields)


def turn(**fields: Any) -> Turn:
    messages = [{"role": "user", "content": "Hello"}]
    return Turn.model_validate({"model": "m", "messages": messages, **fields})


def claim_of(one: Turn, *tries: str, **fields: Any) -> Claim:
    log = ",".join(f'{{"worker":"w0","outcome":"{outcome}","at":1.5}}' for outcome in tries)
    return Claim(
        **{
            "hash": one.hash,
            "token": "w1w1w1w10000000000000001",
            "company": Company.ANY,
            "enqueued": 5.0,
            "body": encode_turn(one),
            "log": log.encode(),
            **fields,
        }
    )


async def ended(what: Answer | BaseException, claim: Claim | None = None) -> Finish:
    context = {"engine": Scripted(what), "worker": "w1w1w1w1"}
    return await answer_turn(context, claim or claim_of(turn()), Progress())


def record(model: type[Model], finish: Finish) -> Model:
    assert isinstance(finish.record, bytes)
    return decode(model, finish.record)


async def test_an_answer_is_a_reply_with_a_trace() -> None:
    claim = claim_of(turn(), "lapse", "retry")
    engine, progress = Scripted(answered(logprobs={"content": []})), Progress()
    finish = await answer_turn({"engine": engine, "worker": "w1w1w1w1"}, claim, progress)
    assert engine.asked == [(turn(), claim.hash + claim.token)]
    assert (finish.hash, finish.token, finish.verb) == (claim.hash, claim.token, "ok")
    reply = record(Reply, finish)
    assert reply.hash == claim.hash
    assert reply.message.content == "Hello"
    assert (reply.finish_reason, reply.capped, reply.limit) == ("stop", None, None)
    assert reply.usage == Usage(prompt_tokens=7, completion_tokens=3)
    assert reply.logprobs == {"content": []}
    trace = decode(Trace, finish.trace)
    assert (trace.worker, trace.outcome, trace.engine) == ("w1w1w1w1", "completed", IDENTITY)
    assert [one.outcome for one in trace.earlier] == ["lapse", "retry"]
    assert trace.request == {"endpoint": "scripted", "prompt_tokens": 7}
    times = trace.times
    assert times.enqueued == 5.0
    stages = [times.claimed, times.rendered, times.sent, times.first_token, times.finished]
    assert stages == sorted(stages, key=lambda at: at or 0)


@pytest.mark.parametrize("by", ["output", "context"])
async def test_a_cap_says_which_limit_was_met(by: Any) -> None:
    finish = await ended(answered("length", limited_by=by, limit=3))
    reply = record(Reply, finish)
    assert (reply.finish_reason, reply.capped, reply.limit) == ("length", by, 3)
    assert decode(Trace, finish.trace).outcome == "capped"


async def test_a_limit_that_was_not_met_is_no_cap() -> None:
    reply = record(Reply, await ended(answered("stop", limited_by="output", limit=3)))
    assert (reply.capped, reply.limit) == (None, None)


async def test_a_prompt_without_room_is_capped_and_empty() -> None:
    finish = await ended(NoRoom(120, 100))
    assert finish.verb == "ok"
    reply = record(Reply, finish)
    assert reply.message.content == ""
    assert (reply.finish_reason, reply.capped, reply.limit) == ("length", "context", 100)
    assert reply.usage == Usage(prompt_tokens=120)
    trace = decode(Trace, finish.trace)
    assert trace.outcome == "capped"
    assert trace.request == {"endpoint": None, "prompt_tokens": 120}


@pytest.mark.parametrize("what", [answered(), NoRoom(120, 100), InvalidRequest("no")])
@pytest.mark.parametrize("tries", [(), ("lapse", "retry")])
@pytest.mark.parametrize("resumed_at", [0, 5])
@pytest.mark.parametrize("body", [{}, {"body": b"{}"}])
async def test_a_trace_is_stored_as_its_model_would_be(
    what: Any, tries: tuple[str, ...], resumed_at: int, body: dict[str, Any]
) -> None:
    claim = claim_of(turn(), *tries, **body)
    context = {"engine": Scripted(what), "worker": "w1w1w1w1"}
    finish = await answer_turn(context, claim, Progress(resumed_at=resumed_at))
    trace = decode(Trace, finish.trace)
    assert trace.resumed_at == (resumed_at or None)
    assert encode(trace) == finish.trace


async def test_what_the_engine_refuses_fails_in_its_own_words() -> None:
    finish = await ended(InvalidRequest("roles must alternate"), claim_of(turn(), "lapse"))
    assert (finish.verb, finish.detail) == ("fail", "invalid_request")
    failure = record(Failure, finish)
    assert (failure.kind, failure.text) == ("invalid_request", "roles must alternate")
    assert failure.tries == 2
    assert decode(Trace, finish.trace).outcome == "failed"


@pytest.mark.parametrize(
    "error",
    [
        TurnError("out of memory"),
        RuntimeError("an adapter's own bug"),
        answered(message={"role": "assistant", "content": 5}),
        answered(message={"content": "from nobody"}),
    ],
    ids=["engine", "adapter", "content", "role"],
)
async def test_an_engine_that_fails_is_asked_three_times(error: Any) -> None:
    first = await ended(error)
    assert (first.verb, first.record) == ("requeue", "retry")
    second = await ended(error, claim_of(turn(), "retry"))
    assert (second.verb, second.record) == ("requeue", "retry")
    assert int(second.detail) > int(first.detail) > 0
    # Tries that ended for other reasons do not count.
    third = await ended(error, claim_of(turn(), "drain", "retry", "lapse", "retry"))
    assert (third.verb, third.detail) == ("fail", "engine_error")
    assert record(Failure, third).tries == 5


@pytest.mark.parametrize("how", [EngineDied("gone"), asyncio.CancelledError()], ids=repr)
async def test_deaths_and_cancellations_are_the_worker_s_business(how: BaseException) -> None:
    with pytest.raises(type(how)):
        await ended(how)


@pytest.mark.parametrize(
    "body",
    [b"", b"nonsense", b"[]", b"{}", b"Znonsense", encode_turn(turn(sample=1))],
    ids=["empty", "nonsense", "list", "no version", "damaged", "another turn"],
)
async def test_a_body_that_is_not_this_turn_is_unreadable(body: bytes) -> None:
    finish = await ended(answered(), claim_of(turn(), body=body))
    assert (finish.verb, finish.detail) == ("fail", "unreadable")


async def test_a_body_with_wrong_fields_says_which() -> None:
    finish = await ended(answered(), claim_of(turn(), body=b'{"v":1,"model":"m","messages":[]}'))
    assert (finish.verb, finish.detail) == ("fail", "invalid_request")
    assert record(Failure, finish).text.startswith("messages: ")


async def test_a_body_that_another_writer_spelt_is_the_same_turn() -> None:
    body = b'{"v": 1, "sample": 0, "model": "m", "messages": [{"role":"user","content":"Hello"}]}'
    assert (await ended(answered(), claim_of(turn(), body=body))).verb == "ok"


async def test_large_integers_are_in_the_hash_although_the_body_has_them_plain() -> None:
    schema = {"type": "function", "function": {"name": "f", "parameters": {"maximum": 2**64}}}
    assert (await ended(answered(), claim_of(turn(tools=[schema])))).verb == "ok"


async def test_a_large_body_is_read_all_the_same() -> None:
    one = Turn.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": f"{list(range(70_000))}"}]}
    )
    claim = claim_of(one, body=one.body)
    assert len(claim.body) > LARGE_BODY
    assert (await ended(answered(), claim)).verb == "ok"


def _left_alone(finish: Finish, reason: str) -> None:
    assert (finish.verb, finish.record) == ("requeue", reason)
    assert finish.detail == str(int(NOT_MINE_AFTER * 1000))


async def test_a_newer_turn_is_left_to_a_newer_worker() -> None:
    newer = claim_of(turn(), body=b'{"v":2,"model":"m"}')
    _left_alone(await ended(answered(), newer), "newer")


async def test_a_turn_for_another_revision_is_left_to_its_worker() -> None:
    _left_alone(await ended(answered(), claim_of(turn(revision="r2"))), "revision")
    assert (await ended(answered(), claim_of(turn(revision="r1")))).verb == "ok"


async def test_a_turn_in_the_wrong_queue_fails() -> None:
    finish = await ended(answered(), claim_of(turn(model="other")))
    assert (finish.verb, finish.detail) == ("fail", "invalid_request")
    assert "'other'" in record(Failure, finish).text


async def test_a_failure_with_half_a_surrogate_pair_in_its_text_can_be_stored() -> None:
    finish = await ended(InvalidRequest("half a pair: \ud83d"))
    assert finish.verb == "fail"
    assert isinstance(finish.record, bytes)
    assert decode(Failure, finish.record).text.startswith("half a pair: ")
