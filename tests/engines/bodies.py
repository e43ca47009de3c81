"""Requests that are asked of an engine in turnmill and of its own HTTP server: prompts and replies must be equal."""

from __future__ import annotations

from typing import Any

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "strict": True,  # else any arguments will do
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


TOOL_HISTORY = [
    {"role": "user", "content": "What is the weather in Oslo?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Os\\"lo\\u00e9"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Rain"}]},
]

FORCED = "a tool that must be called"

BODIES: dict[str, dict[str, Any]] = {
    "one message": {"messages": [{"role": "user", "content": "Hello"}]},
    "several turns": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi."},
            {"role": "user", "content": "今日はいい天気です。"},
        ]
    },
    "tools": {"messages": [{"role": "user", "content": "Weather?"}], "tools": [WEATHER]},
    "tools, but none wanted": {
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [WEATHER],
        "tool_choice": "none",
    },
    FORCED: {
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "tool calls in history": {"messages": TOOL_HISTORY, "tools": [WEATHER]},
    "empty tool calls in history": {
        "messages": [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi.", "tool_calls": []},
            {"role": "user", "content": "And now?"},
        ]
    },
    "parts": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}],
            }
        ]
    },
    "reasoning in history": {
        "messages": [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi.", "reasoning_content": "A greeting."},
            {"role": "user", "content": "And now?"},
        ]
    },
    "keys that nobody knows": {
        "messages": [{"role": "user", "content": "Hello", "mood": "good"}],
        "tools": [{**WEATHER, "version": 2}],
    },
    "logprobs": {
        "messages": [{"role": "user", "content": "Hello"}],
        "logprobs": True,
        "top_logprobs": 3,
    },
    "stop strings": {"messages": [{"role": "user", "content": "Hello"}], "stop": ["e", "a"]},
}


PROMPTS = {
    "plain": {"prompt": "Once upon a time"},
    "a template's own marks": {"prompt": "<|im_start|>user\nHello<|im_end|>\n"},
    "logprobs": {"prompt": "The river", "logprobs": True, "top_logprobs": 2},
    "json": {"prompt": "The river", "response_format": {"type": "json_object"}},
    "stop strings": {"prompt": "The river", "stop": ["e", "a"]},
}


SAMPLING_FIELDS = {
    "temperature",
    "max_tokens",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "stop",
}


def without_call_ids(message: dict[str, Any]) -> dict[str, Any]:
    message = {key: value for key, value in message.items() if value is not None}
    for call in message.get("tool_calls", ()):
        del call["id"]
    return message


def rounded(value: Any) -> Any:
    """A prefix that is cached, or not, changes the last digits of what follows."""
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value
