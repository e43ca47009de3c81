"""An OpenAI completion, of a chat or a prompt, put together again from the chunks of its stream."""

from __future__ import annotations

from typing import Any

_PARTS = ("content", "reasoning_content", "reasoning", "tool_calls")


class Chunks:
    """Takes the chunks of one choice, or the one object of an answer that was not streamed. `pieces`: how many of
    them had a part of the answer."""

    def __init__(self) -> None:
        self.pieces = 0
        self.finish: str | None = None
        self.usage: dict[str, Any] = {}
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._logprobs: list[dict[str, Any]] = []

    def add(self, chunk: dict[str, Any]) -> None:
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices") or ():
            self.finish = choice.get("finish_reason") or self.finish
            self._logprobs += _tokens(choice.get("logprobs") or {})
            delta = choice.get("delta") or choice.get("message") or {}
            if text := choice.get("text"):
                delta = {"content": text}
            self._add_delta(delta)
            self.pieces += any(delta.get(key) for key in _PARTS)

    def message(self) -> dict[str, Any]:
        """The assistant message. Its `content` is None only beside tool calls."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
        return message

    def logprobs(self, top: int) -> dict[str, Any]:
        """OpenAI's `choices[0].logprobs`, with `top` rivals for each token and no keys of others."""
        return {
            "content": [
                _entry(token) | {"top_logprobs": [_entry(t) for t in _top(token)[:top]]}
                for token in self._logprobs
            ]
        }

    def _add_delta(self, delta: dict[str, Any]) -> None:
        if text := delta.get("content"):
            self._content.append(text)
        if text := delta.get("reasoning_content") or delta.get("reasoning"):
            self._reasoning.append(text)
        for position, part in enumerate(delta.get("tool_calls") or ()):
            call = self._calls.setdefault(
                part.get("index", position),
                {"id": "", "type": "function", "function": {"name": "", "arguments": ""}},
            )
            call["id"] = part.get("id") or call["id"]
            function = part.get("function") or {}
            call["function"]["name"] += function.get("name") or ""
            call["function"]["arguments"] += function.get("arguments") or ""


def _entry(token: dict[str, Any]) -> dict[str, Any]:
    return {"token": token["token"], "logprob": token["logprob"], "bytes": token.get("bytes")}


def _top(token: dict[str, Any]) -> list[dict[str, Any]]:
    return token.get("top_logprobs") or []


def _tokens(logprobs: dict[str, Any]) -> list[dict[str, Any]]:
    """A chat's tokens as they are; those of a completion, which are columns, in a chat's shape."""
    if "tokens" not in logprobs:
        return logprobs.get("content") or []
    tokens, values = logprobs["tokens"], logprobs["token_logprobs"]
    tops = logprobs.get("top_logprobs") or [None] * len(tokens)
    return [
        {
            "token": token,
            "logprob": logprob,
            "top_logprobs": sorted(
                ({"token": text, "logprob": value} for text, value in (top or {}).items()),
                key=lambda entry: -entry["logprob"],
            ),
        }
        for token, logprob, top in zip(tokens, values, tops, strict=True)
    ]
