"""How servers say that a turn does not fit into the model's context. OpenAI has a code for it; others have sentences,
some of them several. Where a sentence has the numbers, they are read."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

_CODES = ("context_length_exceeded", "exceed_context_size_error", "context_overflow")

_NUMBERS = [
    re.compile(pattern, re.IGNORECASE | re.DOTALL)
    for pattern in (
        # SGLang: before its scheduler, in it, and prompt and answer together
        r"input \((?P<prompt>\d+) tokens\) is longer than the model's context length \((?P<context>\d+)",
        r"input length \((?P<prompt>\d+) tokens\) exceeds the maximum allowed length \((?P<context>\d+)",
        r"maximum context length of (?P<context>\d+) tokens.*?(?P<prompt>\d+) tokens from the input",
        # vLLM, in its versions
        r"maximum context length is (?P<context>\d+) tokens.*?prompt contains (?P<least>at least )?(?P<prompt>\d+)",
        r"maximum context length is (?P<context>\d+) tokens.*?request has (?P<prompt>\d+) input tokens",
        r"prompt \(length (?P<prompt>\d+)\) is longer than the maximum model length of (?P<context>\d+)",
        # OpenAI, and who speaks like it: DeepSeek, OpenRouter, older vLLM, FastChat, Dynamo
        r"maximum context length is (?P<context>\d+) tokens.*?\((?P<prompt>\d+) (?:in the messages|in your prompt|in the prompt|of text input)",
        r"maximum context length is (?P<context>\d+) tokens.*?resulted in (?P<prompt>\d+) tokens",
        # llama.cpp, which has the numbers in fields of their own, too
        r"request \((?P<prompt>\d+) tokens\) exceeds the available context size \((?P<context>\d+)",
        # TGI, Mistral, xAI, Gemini, Anthropic
        r"must be <= (?P<context>\d+)\. Given: (?P<prompt>\d+) `inputs`",
        r"`inputs` must have less than (?P<context>\d+) tokens\. Given: (?P<prompt>\d+)",
        r"prompt contains (?P<prompt>\d+) tokens.*?model with (?P<context>\d+) maximum context length",
        r"maximum prompt length is (?P<context>\d+) but the request contains (?P<prompt>\d+) tokens",
        r"input token count \((?P<prompt>\d+)\) exceeds the maximum number of tokens allowed \((?P<context>\d+)",
        r"prompt is too long: (?P<prompt>\d+) tokens > (?P<context>\d+)",
        r"exceed context limit: (?P<prompt>\d+) \+ \d+ > (?P<context>\d+)",
        # no length of the prompt
        r"maximum context length (?:is|of) (?P<context>\d+)",
        r"context length of only (?P<context>\d+) tokens",
    )
]

_WORDS = re.compile(
    r"maximum context length|maximum model length|maximum prompt length|longer than the model's context"
    r"|context[ _]length[ _](?:is )?exceeded|context length of only"
    r"|exceeds? (?:the |its |this model's )?(?:available |model's |maximum )?context"
    r"|(?:prompt|input) is too long|reduce the length of the (?:messages|prompt|input)"
    r"|input length .* exceeds the maximum allowed length|input token count .* exceeds the maximum"
    r"|`inputs` (?:tokens \+|must have less than)|max_tokens must be at least 1, got -",
    re.IGNORECASE | re.DOTALL,
)


class TooLong(NamedTuple):
    """A refusal because of the context: `prompt` and `context` in tokens, as far as it says them. Without
    `exact` the prompt has at least so many."""

    prompt: int | None = None
    context: int | None = None
    exact: bool = True


def too_long(error: dict[str, Any], words: str) -> TooLong | None:
    """What a server's error object says of the context; None if it is about something else."""
    coded = any(str(error.get(key) or "").lower() in _CODES for key in ("code", "type"))
    if not coded and not _WORDS.search(words):
        return None
    if isinstance(error.get("n_prompt_tokens"), int) and isinstance(error.get("n_ctx"), int):
        return TooLong(error["n_prompt_tokens"], error["n_ctx"])
    for pattern in _NUMBERS:
        if found := pattern.search(words):
            said = found.groupdict()
            prompt = int(said["prompt"]) if said.get("prompt") else None
            return TooLong(prompt, int(said["context"]), exact=not said.get("least"))
    return TooLong()
