"""All wordings in which servers say that a turn does not fit."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engines.asking import turn

from turnmill_worker.engines.base import InvalidRequest, NoRoom
from turnmill_worker.engines.openai_room import ServersRoom
from turnmill_worker.engines.too_long import TooLong, too_long

WORDS = {
    "SGLang, the tokenizer": (
        "The input (300 tokens) is longer than the model's context length (256 tokens).",
        TooLong(300, 256),
    ),
    "SGLang, the scheduler": (
        "Input length (252 tokens) exceeds the maximum allowed length (250 tokens). Use a shorter input or enable "
        "--allow-auto-truncate.",
        TooLong(252, 250),
    ),
    "SGLang, both": (
        "Requested token count exceeds the model's maximum context length of 256 tokens. You requested a total of 348 "
        "tokens: 248 tokens from the input messages and 100 tokens for the completion. Please reduce the number of tokens "
        "in the input messages or the completion to fit within the limit.",
        TooLong(248, 256),
    ),
    "vLLM, both": (
        "'max_tokens' or 'max_completion_tokens' is too large: 1000. This model's maximum context length is 4096 tokens "
        "and your request has 4000 input tokens (1000 > 4096 - 4000).",
        TooLong(4000, 4096),
    ),
    "vLLM, the prompt": (
        "This model's maximum context length is 4096 tokens. However, your request has 5000 input tokens. Please reduce "
        "the length of the input messages.",
        TooLong(5000, 4096),
    ),
    "vLLM, which stopped counting": (
        "This model's maximum context length is 16384 tokens. However, you requested 8192 output tokens and your prompt "
        "contains at least 8193 input tokens, for a total of at least 16385 tokens.",
        TooLong(8193, 16384, exact=False),
    ),
    "vLLM, its processor": (
        "The decoder prompt (length 5951) is longer than the maximum model length of 4096. Make sure that `max_model_len` "
        "is no smaller than the number of text tokens.",
        TooLong(5951, 4096),
    ),
    "vLLM, long ago": ("max_tokens must be at least 1, got -904.", TooLong()),
    "OpenAI, both": (
        "This model's maximum context length is 4097 tokens. However, you requested 4268 tokens (4012 in the messages, "
        "256 in the completion). Please reduce the length of the messages or completion.",
        TooLong(4012, 4097),
    ),
    "OpenAI, a prompt": (
        "This model's maximum context length is 8191 tokens, however you requested 10346 tokens (10346 in your prompt; 5 "
        "for the completion). Please reduce your prompt; or completion length.",
        TooLong(10346, 8191),
    ),
    "OpenAI, the messages": (
        "This model's maximum context length is 8192 tokens. However, your messages resulted in 8227 tokens. Please "
        "reduce the length of the messages.",
        TooLong(8227, 8192),
    ),
    "OpenAI, without numbers": (
        "Your input exceeds the context window of this model. Please adjust your input and try again.",
        TooLong(),
    ),
    "OpenRouter": (
        "This endpoint's maximum context length is 8192 tokens. However, you requested about 9500 tokens (9000 of text "
        "input, 500 in the output). Please reduce the length of either one.",
        TooLong(9000, 8192),
    ),
    "llama.cpp": (
        "request (9412 tokens) exceeds the available context size (8192 tokens), try increasing it",
        TooLong(9412, 8192),
    ),
    "llama.cpp, before": (
        "the request exceeds the available context size, try increasing it",
        TooLong(),
    ),
    "TGI, both": (
        "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 4000 `inputs` tokens and 500 "
        "`max_new_tokens`",
        TooLong(4000, 4096),
    ),
    "TGI, the prompt": (
        "Input validation error: `inputs` must have less than 4096 tokens. Given: 5000",
        TooLong(5000, 4096),
    ),
    "Mistral": (
        "Prompt contains 235396 tokens and 0 draft tokens, too large for model with 131072 maximum context length",
        TooLong(235396, 131072),
    ),
    "xAI": (
        "This model's maximum prompt length is 131072 but the request contains 140000 tokens.",
        TooLong(140000, 131072),
    ),
    "Gemini": (
        "The input token count (1196265) exceeds the maximum number of tokens allowed (1048575).",
        TooLong(1196265, 1048575),
    ),
    "Anthropic, the prompt": (
        "prompt is too long: 213462 tokens > 200000 maximum",
        TooLong(213462, 200000),
    ),
    "Anthropic, both": (
        "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000, decrease input length or `max_tokens` "
        "and try again",
        TooLong(190000, 200000),
    ),
    "Bedrock": ("Input is too long for requested model.", TooLong()),
    "Groq": ("Please reduce the length of the messages or completion.", TooLong()),
    "LM Studio": (
        "Trying to keep the first 5000 tokens when context overflows. However, the model is loaded with context length of "
        "only 4096 tokens, which is not enough.",
        TooLong(None, 4096),
    ),
}


@pytest.mark.parametrize("server", WORDS)
def test_a_wording_is_understood(server: str) -> None:
    words, said = WORDS[server]
    assert too_long({"message": words, "code": 400}, words) == said


@pytest.mark.parametrize(
    "error",
    [
        {"code": "context_length_exceeded", "message": "No."},
        {"code": 400, "type": "exceed_context_size_error", "message": "No."},
    ],
)
def test_a_code_is_enough(error: dict[str, Any]) -> None:
    assert too_long(error, error["message"]) == TooLong()


def test_fields_go_before_words() -> None:
    error = {"type": "exceed_context_size_error", "n_prompt_tokens": 501, "n_ctx": 256}
    assert too_long(error, "request (1 tokens)") == TooLong(501, 256)


@pytest.mark.parametrize(
    "words",
    [
        "max_tokens is too large: 100000. This model supports at most 16384 completion tokens, whereas you provided "
        "100000.",
        "Invalid value for 'temperature': must be at most 2",
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
        "Conversation roles must alternate user/assistant/user/assistant/...",
        "string too long. Expected a string with maximum length 64",
        "",
    ],
)
def test_what_is_about_something_else_is_not_taken_for_it(words: str) -> None:
    assert too_long({"message": words, "code": "invalid_request"}, words) is None


# What follows from it


def test_an_answer_is_asked_for_that_fits() -> None:
    room = ServersRoom(turn("Hi", max_tokens=100), 256)
    room.shrink(TooLong(248, 256), "")
    assert (room.send, room.met(248, 8)) == (8, ("context", 256))


def test_the_smaller_context_counts() -> None:
    """SGLang's words name its context, of which 2 tokens are never used."""
    room = ServersRoom(turn("Hi", max_tokens=100), 254)
    room.shrink(TooLong(248, 256), "")
    assert room.send == 6


@pytest.mark.parametrize("said", [TooLong(), TooLong(100, 256, exact=False), TooLong(None, 256)])
def test_without_a_number_as_many_as_fit_are_asked_for(said: TooLong) -> None:
    room = ServersRoom(turn("Hi", max_tokens=200), 0)
    room.shrink(said, "")
    assert room.send is None
    assert room.met(100, 150) == ("context", 250)
    with pytest.raises(NoRoom):
        room.shrink(said, "")


def test_a_prompt_that_fills_the_context_has_no_room() -> None:
    with pytest.raises(NoRoom) as refused:
        ServersRoom(turn("Hi", max_tokens=1), 0).shrink(TooLong(256, 256), "")
    assert (refused.value.prompt_tokens, refused.value.limit) == (256, 256)


def test_of_what_is_not_said_the_least_is_reported() -> None:
    with pytest.raises(NoRoom) as refused:
        ServersRoom(turn("Hi", max_tokens=None), 256).shrink(TooLong(), "")
    assert (refused.value.prompt_tokens, refused.value.limit) == (256, 256)


def test_a_server_that_contradicts_itself_is_quoted() -> None:
    room = ServersRoom(turn("Hi", max_tokens=8), 256)
    with pytest.raises(InvalidRequest, match="the words"):
        room.shrink(TooLong(100, 256), "the words")


def test_an_output_cap_is_the_turn_s_own() -> None:
    assert ServersRoom(turn("Hi", max_tokens=8), 256).met(10, 8) == ("output", 8)
    assert ServersRoom(turn("Hi", max_tokens=8), 256).met(0, 0) == ("output", 8)
    assert ServersRoom(turn("Hi", max_tokens=100), 256).met(10, 50) == ("context", 60)
