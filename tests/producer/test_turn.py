"""The identity of a turn: pinned by golden values, and held by properties."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from turnmill.errors import BadTurn
from turnmill.turn import Message, Sampling, Tool, Turn, explain
from turnmill.wire import decode_turn, encode_turn


def turn(content: Any = "Hello", **fields: Any) -> Turn:
    messages = fields.pop("messages", [{"role": "user", "content": content}])
    return Turn.model_validate({"model": "m", "messages": messages, **fields})


def with_schema(schema: Any) -> Turn:
    return turn(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}])


GOLDEN = {
    "plain": turn(),
    "all fields": Turn(
        model="Qwen/Qwen3-8B",
        revision="main",
        messages=[
            Message(role="system", content="Sei kurz. 简短。"),
            Message(role="user", content=[{"type": "text", "text": "Wetter? ☀️"}]),
            Message(
                role="assistant",
                reasoning_content="hm",
                tool_calls=[
                    {
                        "id": "call_0",
                        "type": "function",
                        "function": {"name": "weather", "arguments": '{"city": "Ulm"}'},
                    }
                ],
            ),
            Message(role="tool", tool_call_id="call_0", content="20.5"),
        ],
        tools=[Tool(function={"name": "weather", "parameters": {"maximum": 2**64}})],
        tool_choice="auto",
        response_format={"type": "json_object"},
        chat_template_kwargs={"enable_thinking": False},
        sampling=Sampling(temperature=0.7, top_p=1, max_tokens=100, stop=["\n"], seed=3),
        sample=2**53 - 1,
    ),
    "greedy": turn(sampling={"temperature": 0}),
    "a draw": turn(sample=1),
    "prompt": Turn(model="m", prompt="Once upon a time"),
    "numbers": with_schema({"enum": [1e20, 2**64, 0.1, -0.0, 1e21, 5e-324, None, True]}),
}
HASHES = {
    "plain": "173b933ab15ddf9a9673028f6c8e1b401b0c4ae6fe8fcdc742a3b57349b6fe5b",
    "all fields": "0a044e95c519474bcb9cad1b57ea4f0ba6d3f760e1fd4d6fad777d09f531a768",
    "greedy": "f5cc6bd75f8023ddff19a4c7e7de242a474c351b1489015467db2cbc13b63b27",
    "a draw": "0e67e0527eaaf676e0201a0c33c1fecabaf1d43e469ce6272a341c13908d9fd3",
    "prompt": "32df223ca4cc77a23b9b45cab59c6422778320a9a0e1df1eabeab8e4eeaf5e80",
    "numbers": "27b6e4dcb153d01a5b5333cd9036ae7ddd648ac107c051a6313831285165b1d5",
}


@pytest.mark.parametrize("name", GOLDEN)
def test_hashes_stay_what_they_are(name: str) -> None:
    assert GOLDEN[name].hash == HASHES[name]


def test_the_hash_is_sha256_of_canonical_json() -> None:
    """As any language would make it."""
    text = '{"messages":[{"content":"Hello","role":"user"}],"model":"m","sample":0,"v":1}'
    assert turn().body == text.encode()
    assert turn().hash == hashlib.sha256(text.encode()).hexdigest()


def test_the_body_of_a_prompt_has_no_messages() -> None:
    asked = Turn(model="m", prompt="Once upon a time")
    assert asked.body == b'{"model":"m","prompt":"Once upon a time","sample":0,"v":1}'
    assert decode_turn(encode_turn(asked)) == asked
    assert (asked.question, turn().question) == ("Once upon a time", turn().messages)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "messages: Field required, unless there is a prompt"),
        ({"messages": []}, "messages: Field required, unless there is a prompt"),
        ({"prompt": ""}, "prompt: String should have at least 1 character"),
        ({"prompt": "a", "messages": [{"role": "user"}]}, "prompt: not beside messages"),
        ({"prompt": "a", "tool_choice": "none"}, "tool_choice: not beside a prompt"),
        ({"prompt": "a", "tools": [{"function": {"name": "f"}}]}, "tools: not beside a prompt"),
    ],
)
def test_a_turn_asks_one_thing(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BadTurn) as error:
        Turn.from_body({"model": "m", **fields})
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("one", "same"),
    [
        (turn(revision=None, tools=None, sampling={"top_p": None}), turn()),
        (turn(sampling={"temperature": 1.0}), turn(sampling={"temperature": 1})),
        (with_schema({"maximum": 1.0}), with_schema({"maximum": 1})),
        (with_schema({"maximum": -0.0}), with_schema({"maximum": 0})),
        (with_schema({"maximum": 1e20}), with_schema({"maximum": 10**20})),
        (with_schema({"a": 1, "b": 2}), with_schema({"b": 2, "a": 1})),
        (turn(sampling={"stop": "END"}), turn(sampling={"stop": ["END"]})),
        (turn(sampling={"stop": []}), turn()),
        (turn(tools=[]), turn()),
        (with_schema({"enum": (1, 2)}), with_schema({"enum": [1, 2]})),
    ],
)
def test_one_meaning_has_one_hash(one: Turn, same: Turn) -> None:
    assert one.hash == same.hash


@pytest.mark.parametrize(
    "other",
    [
        turn("hello"),
        turn("Hello "),
        turn([{"type": "text", "text": "Hello"}]),
        turn(messages=[{"role": "system", "content": "Hello"}]),
        turn(messages=[{"role": "user", "content": "Hello", "name": "Ada"}]),
        turn(messages=[{"role": "user", "content": "Hello", "cache_control": {}}]),
        turn(model="n"),
        turn(revision="r1"),
        turn(sample=1),
        turn(tool_choice="none"),
        turn(response_format={"type": "text"}),
        turn(chat_template_kwargs={"enable_thinking": False}),
        turn(sampling={"temperature": 1}),
        turn(sampling={"max_tokens": 1}),
        turn(sampling={"logprobs": False}),
        turn(sampling={"stop": ["a", "b"]}),
        turn(sampling={"stop": ["b", "a"]}),
        with_schema({"enum": [None]}),
        with_schema({"enum": []}),
        with_schema({"enum": [1]}),
        with_schema({"enum": ["1"]}),
        with_schema({"enum": [True]}),
        with_schema({"enum": [2**53]}),
        with_schema({"enum": [2**53 + 1]}),
    ],
)
def test_another_meaning_has_another_hash(other: Turn) -> None:
    others = [turn(), with_schema({}), turn(sampling={"stop": "ab"})]
    assert other.hash not in {one.hash for one in others}


def test_large_integers_are_told_apart_and_stored_as_they_are() -> None:
    limits = [2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**63) - 1]
    assert len({with_schema({"maximum": limit}).hash for limit in limits}) == len(limits)
    for limit in limits:
        stored = json.loads(with_schema({"maximum": limit}).body)
        assert stored["tools"][0]["function"]["parameters"]["maximum"] == limit


@pytest.mark.parametrize(
    "value",
    [
        "\ud800",
        {"\ud800": 1},
        [2**64, "\udfff"],
        float("nan"),
        float("inf"),
        {1: "a key that is no string"},
        {1, 2},
        b"bytes",
    ],
)
def test_what_has_no_canonical_json_is_refused(value: Any) -> None:
    with pytest.raises(BadTurn, match="no canonical JSON"):
        _ = with_schema(value).hash


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"sampling": {"temprature": 1}}, "sampling.temprature: Extra inputs are not permitted"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature: "),
        ({"sampling": {"temperature": float("nan")}}, "sampling.temperature: "),
        ({"sampling": {"max_tokens": 0}}, "sampling.max_tokens: "),
        ({"messages": []}, "messages: "),
        ({"messages": [{"content": "who says this?"}]}, "messages.0.role: "),
        ({"model": ""}, "model: "),
        ({"sample": -1}, "sample: "),
        ({"sample": 2**53}, "sample: "),
        ({"stream": True}, "stream: Extra inputs are not permitted"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as wrong:
        turn(**fields)
    line = explain(wrong.value)
    assert line.startswith(said)
    assert "\n" not in line


def test_a_copy_has_its_own_hash() -> None:
    first = turn()
    hashed = (first.hash, first.body)
    second = first.model_copy(update={"sample": 1})
    assert second.hash == turn(sample=1).hash
    assert second.body == turn(sample=1).body
    assert (first.hash, first.body) == hashed
    for same in (first.model_copy(), copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert same == first == turn()
        assert same.hash == first.hash


def test_turns_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        turn().model = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("sampling", "shared"),
    [
        ({}, False),
        ({"temperature": 0}, True),
        ({"temperature": 0.0, "top_p": 0.5}, True),
        ({"temperature": 0.7}, False),
        ({"temperature": 0.7, "seed": 0}, True),
        ({"top_k": 1}, False),
    ],
)
def test_who_may_share_an_answer(sampling: dict[str, Any], shared: bool) -> None:
    assert turn(sampling=sampling).shared is shared


def test_keys_that_benchmarks_add_are_kept() -> None:
    message = {"role": "user", "content": "a", "extra": {"deep": [1, None]}}
    tool = {"type": "function", "function": {"name": "f"}, "response": {"type": "dict"}}
    back = decode_turn(encode_turn(turn(messages=[message], tools=[tool])))
    assert back.messages[0].model_dump(exclude_none=True) == message
    assert back.tools is not None
    assert back.tools[0].model_dump(exclude_none=True) == tool


# Properties

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
        optional={
            "content": TEXT
            | st.lists(st.fixed_dictionaries({"type": TEXT, "text": TEXT}), max_size=2),
            "reasoning_content": TEXT,
            "tool_calls": st.lists(st.dictionaries(TEXT, JSON, max_size=2), max_size=2),
            "x_extra": JSON,
        },
    ),
    min_size=1,
    max_size=3,
)
TURNS = st.builds(
    lambda messages, schema, sampling, sample: turn(
        messages=messages,
        tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}],
        sampling=sampling,
        sample=sample,
    ),
    MESSAGES,
    JSON,
    st.fixed_dictionaries(
        {}, optional={"temperature": st.floats(0, 2), "seed": st.integers(), "stop": st.lists(TEXT)}
    ),
    st.integers(0, 2**53 - 1),
)


@given(TURNS)
def test_a_stored_turn_reads_back_with_its_hash(one: Turn) -> None:
    back = decode_turn(encode_turn(one))
    assert back.hash == one.hash
    assert decode_turn(encode_turn(back)).body == back.body


@given(TURNS)
def test_a_body_without_large_numbers_can_be_checked_by_hashing_it(one: Turn) -> None:
    tagged = one.hash != hashlib.sha256(one.body).hexdigest()
    assert not tagged or any(large(value) for value in numbers(json.loads(one.body)))


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers(item)]
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, int | float) else []


def large(number: float) -> bool:
    return isinstance(number, int) and abs(number) > 2**53 - 1


@given(TURNS, st.randoms(use_true_random=False))
def test_the_order_of_keys_says_nothing(one: Turn, random: Any) -> None:
    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            items = [(key, shuffled(item)) for key, item in value.items()]
            random.shuffle(items)
            return dict(items)
        return [shuffled(item) for item in value] if isinstance(value, list) else value

    assert Turn.from_body(shuffled(one.model_dump(exclude_none=True))).hash == one.hash
