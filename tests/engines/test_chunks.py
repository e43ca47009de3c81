from __future__ import annotations

from typing import Any

from turnmill_worker.engines.chunks import Chunks


def whole(*choices: dict[str, Any]) -> Chunks:
    chunks = Chunks()
    for choice in choices:
        chunks.add({"choices": [choice]})
    return chunks


def call(index: int, **fields: Any) -> dict[str, Any]:
    return {"delta": {"tool_calls": [{"index": index, **fields}]}}


def test_content_and_reasoning_are_joined():
    chunks = whole(
        {"delta": {"role": "assistant", "content": None}},
        {"delta": {"reasoning_content": "Hm"}},
        {"delta": {"reasoning_content": "m."}},
        {"delta": {"content": "By the "}},
        {"delta": {"content": "river"}},
        {"delta": {}, "finish_reason": "stop"},
    )
    assert chunks.message() == {
        "role": "assistant",
        "content": "By the river",
        "reasoning_content": "Hmm.",
    }
    assert chunks.finish == "stop"


def test_tool_calls_are_put_together_by_index():
    chunks = whole(
        call(0, id="a", type="function", function={"name": "mill", "arguments": ""}),
        call(0, function={"arguments": '{"x"'}),
        call(1, id="b", type="function", function={"name": "river", "arguments": "{}"}),
        call(0, function={"arguments": ": 1}"}),
        {"delta": {}, "finish_reason": "tool_calls"},
    )
    assert chunks.message() == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "mill", "arguments": '{"x": 1}'}},
            {"id": "b", "type": "function", "function": {"name": "river", "arguments": "{}"}},
        ],
    }


def test_an_answer_that_was_not_streamed_is_taken_whole():
    chunks = Chunks()
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}
            for name in ("mill", "river")
        ],
    }
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    chunks.add({"choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": usage})
    assert (chunks.message(), chunks.finish, chunks.usage) == (message, "tool_calls", usage)


def test_an_empty_answer_has_empty_content():
    assert whole({"delta": {}, "finish_reason": "length"}).message()["content"] == ""


def test_logprobs_have_only_openais_keys():
    entry = {"id": 7, "token": "a", "logprob": -0.5, "bytes": [97]}
    chunks = whole({"delta": {}, "logprobs": {"content": [{**entry, "top_logprobs": [entry]}]}})
    plain = {"token": "a", "logprob": -0.5, "bytes": [97]}
    assert chunks.logprobs(top=1) == {"content": [{**plain, "top_logprobs": [plain]}]}
    assert chunks.logprobs(top=0) == {"content": [{**plain, "top_logprobs": []}]}
