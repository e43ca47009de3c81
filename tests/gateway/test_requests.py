"""What clients really send, and the turns that become of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.gateway.serving import chat

from turnmill.gateway.errors import ApiError
from turnmill.gateway.requests import Question, chat_question, completion_question
from turnmill.gateway.responses import Shape
from turnmill.reply import Reply
from turnmill.turn import Message, Turn

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"n": {"default": None}}},
        "strict": True,
        "response": {"type": "object"},
    },
}


def read(body: dict[str, Any]) -> Question:
    return chat_question(json.dumps(body).encode())


def the_turn(**fields: Any) -> Turn:
    (turn,) = read(chat(**fields)).turns
    return turn


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(chat(**fields))
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"stream": False, "stop": [], "tools": None, "logprobs": False} | {"logprobs": None},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"parallel_tool_calls": True, "n": 1, "modalities": ["text"], "logit_bias": {}},
        {"parallel_tool_calls": False, "tools": [], "tool_choice": "auto"},
        {"response_format": {"type": "text"}, "chat_template_kwargs": {}, "extra": None},
        {"prompt_cache_key": "k", "safety_identifier": "s", "prediction": None},
    ],
)
def test_what_changes_no_answer_changes_no_turn(fields: dict[str, Any]) -> None:
    assert the_turn(**fields).hash == the_turn().hash


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 5, "max_tokens": 5}, {"max_tokens": 5}),
        ({"stop": "END"}, {"stop": ["END"]}),
        ({"stop": ["a", "b"], "temperature": 0}, {"stop": ["a", "b"], "temperature": 0}),
        ({"seed": 3, "logprobs": True, "top_logprobs": 2},) * 2,
        ({"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2},) * 2,
        ({"ignore_eos": True, "frequency_penalty": 1, "presence_penalty": -1},) * 2,
        ({"logit_bias": {"5": -100}},) * 2,
    ],
)
def test_sampling_is_passed_on(fields: dict[str, Any], sampling: dict[str, Any]) -> None:
    expected = Turn.model_validate(chat(sampling=sampling))
    assert the_turn(**fields).hash == expected.hash


def test_messages_as_clients_send_them() -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "Hi", "name": "bob"},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {
            "role": "tool",
            "tool_call_id": "c",
            "name": "f",
            "content": [{"type": "text", "text": "42"}],
        },
    ]
    turn = the_turn(messages=messages, tools=[TOOL], tool_choice="required")
    assert [message.role for message in turn.messages] == ["system", "user", "assistant", "tool"]
    body = json.loads(turn.body)
    assert body["messages"][0]["content"] == messages[0]["content"]
    assert body["messages"][2] == {
        "role": "assistant",
        "tool_calls": messages[2]["tool_calls"],
    }
    assert body["messages"][3] == messages[3]
    assert body["tools"] == [TOOL]
    assert body["tool_choice"] == "required"


def test_a_tool_by_name() -> None:
    choice = {"type": "function", "function": {"name": "f"}}
    assert the_turn(tools=[TOOL], tool_choice=choice).tool_choice == choice


def test_n_asks_for_so_many_turns() -> None:
    turns = read(chat(n=3)).turns
    assert len(turns) == 3
    assert len({turn.hash for turn in turns}) == 1
    seeded = read(chat(n=3, seed=7)).turns
    assert [turn.sampling.seed for turn in seeded] == [7, 8, 9]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("reasoning_effort", {"reasoning_effort": "low"}),
        ("guided_json", {"guided_json": {}}),
        ("parallel_tool_calls", {"parallel_tool_calls": False, "tools": [TOOL]}),
        ("best_of", {"best_of": 2}),
        ("n", {"n": 0}),
        ("n", {"n": 1000}),
        ("temperature", {"temperature": -1}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_completion_tokens", {"max_tokens": 1, "max_completion_tokens": 2}),
        ("messages", {"messages": []}),
        ("messages", {"messages": [{"content": "no role"}]}),
        ("model", {"model": None}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "function"}}),
        (
            "tool_choice",
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        ),
    ],
)
def test_what_is_wrong_is_refused_by_name(param: str, fields: dict[str, Any]) -> None:
    refused = refusal(**fields)
    assert refused.param == param
    assert param in refused.message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"model": "sim", "messages": [{"role": "user", "content": "\xff"}]}',
        b'{"model": "sim", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "sim", "temperature": NaN, "messages": [{"role": "user", "content": ""}]}',
        b'{"a":' * 100_000,
    ],
)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        chat_question(body)
    assert caught.value.status == 400


@pytest.mark.parametrize("prompt", ["", [], [""], [1, 2], [[1, 2]], 7, {"a": 1}])
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(ApiError) as caught:
        completion_question(json.dumps({"model": "m", "prompt": prompt}).encode())
    assert caught.value.param == "prompt"
    assert caught.value.message.endswith("a list of texts, none of them empty")


def test_log_probabilities_of_a_completion() -> None:
    body = {"model": "m", "prompt": "Once", "logprobs": 2}
    question = completion_question(json.dumps(body).encode())
    (turn,) = question.turns
    assert (turn.prompt, turn.sampling.logprobs, turn.sampling.top_logprobs) == ("Once", True, 2)
    tokens = [
        {"token": " upon", "logprob": -0.5, "top_logprobs": [{"token": " upon", "logprob": -0.5}]},
        {"token": " a", "logprob": -1.5, "top_logprobs": []},
    ]
    reply = Reply(
        hash=turn.hash,
        message=Message(role="assistant", content=" upon a"),
        finish_reason="length",
        logprobs={"content": tokens},
    )
    (choice,) = Shape(question, turn.hash).whole([reply])["choices"]
    assert choice["logprobs"] == {
        "tokens": [" upon", " a"],
        "token_logprobs": [-0.5, -1.5],
        "top_logprobs": [{" upon": -0.5}, {}],
        "text_offset": [0, 5],
    }


def test_a_refusal_is_short_however_much_is_wrong() -> None:
    many = refusal(messages=[{}] * 200_000)
    assert many.message == "200000 values are wrong"
    some = refusal(messages=[{}] * 200)
    assert some.param == "messages"
    for refused in (some, refusal(functions=["a" * 100_000]), refusal(**{"b" * 100_000: 1})):
        assert len(refused.message) < 2100
