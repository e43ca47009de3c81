"""What is stored: JSON with a version, compressed when that pays."""

from __future__ import annotations

import json
import math
import random
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnmill.errors import BadTurn, NewerRecord, RecordError
from turnmill.reply import EngineIdentity, Failure, Reply, Trace, Try, Usage
from turnmill.turn import Message, Turn
from turnmill.wire import COMPRESS_FROM, decode, decode_turn, encode, encode_turn, pack, unpack

REPLY = Reply(
    hash="a" * 64,
    message=Message(role="assistant", content="Grüße 👋", tool_calls=[{"id": "1"}]),
    finish_reason="length",
    capped="output",
    limit=5,
    usage=Usage(prompt_tokens=3, completion_tokens=5),
    logprobs={"content": [{"token": "a", "logprob": -0.1}]},
)


@pytest.mark.parametrize(
    "record",
    [
        REPLY,
        Failure(hash="b" * 64, kind="poison", text="bad\nthing", tries=4),
        Trace(
            hash="c" * 64,
            worker="w",
            outcome="failed",
            earlier=[Try(worker="v", outcome="lapse", at=1.5)],
            request={"endpoint": "e", "sampling": {"top_p": 1.0}},
        ),
    ],
)
def test_records_come_back_as_they_were(record: Reply | Failure | Trace) -> None:
    assert decode(type(record), encode(record)) == record


def test_a_record_is_json_with_a_version_and_without_nulls() -> None:
    fields = json.loads(encode(Failure(hash="h", kind="deadline", text="t")))
    assert fields == {"v": 1, "hash": "h", "kind": "deadline", "text": "t", "tries": 1}


@given(st.binary(max_size=200), st.integers(0, 60))
def test_whatever_is_packed_is_unpacked(data: bytes, times: int) -> None:
    text = b"{" + data * times
    assert unpack(pack(text)) == text


def test_what_is_long_and_repeats_itself_is_compressed() -> None:
    text = b'{"a":"' + b"again and again " * 1000 + b'"}'
    assert len(pack(text)) < len(text) / 20
    assert pack(text)[:1] == b"Z"


def test_what_compression_does_not_make_smaller_stays() -> None:
    noise = b"{" + random.Random(1).randbytes(2 * COMPRESS_FROM)
    assert pack(noise) == noise
    short = b"{" + b"a" * (COMPRESS_FROM - 2)
    assert pack(short) == short


def test_long_turns_and_replies_come_back_as_they_were() -> None:
    turn = Turn(model="m", messages=[Message(role="user", content="long " * 5000)])
    assert encode_turn(turn)[:1] == b"Z"
    assert decode_turn(encode_turn(turn)) == turn
    reply = REPLY.model_copy(update={"message": Message(role="assistant", content="so " * 9999)})
    assert decode(Reply, encode(reply)) == reply


def test_a_newer_record_is_left_alone() -> None:
    newer = encode(REPLY).replace(b'"v":1', b'"v":2', 1)
    with pytest.raises(NewerRecord, match="wire version 2"):
        decode(Reply, newer)
    with pytest.raises(NewerRecord):
        decode_turn(b'{"v":2,"words":"of another kind"}')


def test_keys_that_a_later_writer_adds_are_ignored() -> None:
    later = encode(REPLY).replace(b'"v":1', b'"v":1,"mood":"good"', 1)
    assert decode(Reply, later) == REPLY


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not JSON"),
        (b"nonsense", "not JSON"),
        (b'{"v":1,"hash"', "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"v":1,"a":NaN}', "not JSON"),
        (b'["v",1]', "not a JSON object"),
        (b"{}", "no wire version"),
        (b'{"v":"1"}', "no wire version"),
        (b"Z" + b"nonsense", "damaged"),
        (b"Z" + zlib.compress(b" " * (257 << 20), 1), "more than 256 MB"),
        (b"Z" + zlib.compress(b"{" + b"a" * 100)[:-4], "damaged"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_damage_is_said_in_one_line(data: bytes, said: str) -> None:
    for read in (decode_turn, lambda data: decode(Reply, data)):
        with pytest.raises(RecordError, match=said) as error:
            read(data)
        assert "\n" not in str(error.value)


def test_a_body_that_is_no_turn_says_which_field_is_wrong() -> None:
    with pytest.raises(BadTurn, match=r"messages: Field required"):
        decode_turn(b'{"v":1,"model":"m"}')
    with pytest.raises(RecordError, match=r"finish_reason: Field required"):
        decode(Reply, b'{"v":1,"hash":"h","message":{"role":"assistant"}}')


def test_half_a_surrogate_pair_of_an_engine_does_not_lose_the_answer() -> None:
    message = Message(role="assistant", content="so \ud83d far")
    logprobs = {"content": [{"token": "so", "logprob": -math.inf}]}
    reply = Reply(hash="0" * 64, message=message, finish_reason="stop", logprobs=logprobs)
    content = decode(Reply, encode(reply)).message.content
    assert isinstance(content, str)
    assert content.startswith("so \ufffd")
    assert content.endswith(" far")


@pytest.mark.parametrize("text", ["whole", "half \ud83d"])
def test_fields_are_stored_as_the_record_that_they_make(text: str) -> None:
    engine = EngineIdentity(engine="scripted", version="1", model="path")
    fields: dict[str, Any] = {"hash": "0" * 64, "worker": "w", "outcome": "completed"}
    fields |= {"engine": engine, "request": {"text": text}, "times": {"sent": 1.5}}
    stored = encode(fields)
    assert decode(Trace, stored) == decode(Trace, encode(Trace.model_validate(fields)))
    assert decode(Trace, stored).engine == engine
