"""From replies to OpenAI's responses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from turnmill.gateway.requests import Question
from turnmill.reply import Reply


class Shape:
    """One response to a question, whole or in chunks. `id`: that of the first turn that was asked."""

    def __init__(self, question: Question, hash: str) -> None:
        self._question, chat = question, question.chat
        self._head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + hash[:32],
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": question.model,
        }

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        choices = []
        for index, reply in enumerate(replies):
            told: dict[str, Any] = {"index": index, "logprobs": self._logprobs(reply)}
            if self._question.chat:
                message = reply.message.model_dump(exclude_none=True)
                told["message"] = {"content": None, "refusal": None} | message
            else:
                told["text"] = _text(reply)
            choices.append(told | {"finish_reason": reply.finish_reason})
        usage = self._usage(replies)
        return self._head | {"choices": choices, "usage": usage}

    # Chunks

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk before the first text."""
        if not self._question.chat:
            return None
        return self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}})

    def piece(self, index: int, text: str, reply: Reply | None = None) -> dict[str, Any]:
        """Some text; with the log probabilities of the whole, if that is what it is."""
        told: dict[str, Any] = {"index": index, "logprobs": self._logprobs(reply)}
        if self._question.chat:
            told["delta"] = {"content": text}
        else:
            told["text"] = text
        return self._chunk(told)

    def extras(self, index: int, reply: Reply) -> dict[str, Any] | None:
        """What the message has beside its text: reasoning, and tool calls."""
        delta = reply.message.model_dump(exclude={"role", "content"}, exclude_none=True)
        if not delta or not self._question.chat:
            return None
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": i} | call for i, call in enumerate(calls)]
        return self._chunk({"index": index, "delta": delta})

    def closing(self, index: int, reply: Reply) -> dict[str, Any]:
        told: dict[str, Any] = {"index": index, "finish_reason": reply.finish_reason}
        told["delta" if self._question.chat else "text"] = {} if self._question.chat else ""
        return self._chunk(told)

    def usage(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """The chunk with the counts; it has no choices."""
        return self._chunk() | {"choices": [], "usage": self._usage(replies)}

    def _chunk(self, choice: dict[str, Any] | None = None) -> dict[str, Any]:
        head = dict(self._head)
        if self._question.chat:
            head["object"] = "chat.completion.chunk"
        plain = {"logprobs": None, "finish_reason": None}
        chunk = head | {"choices": [plain | (choice or {})]}
        return chunk | {"usage": None} if self._question.include_usage else chunk

    def _logprobs(self, reply: Reply | None) -> dict[str, Any] | None:
        if reply is None or reply.logprobs is None or self._question.chat:
            return reply.logprobs if reply else None
        return _as_of_text(reply.logprobs.get("content") or [])

    def _usage(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """Counts of all choices. A prompt counts once, whatever the number of its choices, as OpenAI does it."""
        usages = [reply.usage for reply in replies]
        prompts = usages[:: self._question.n]
        prompt = sum(usage.prompt_tokens for usage in prompts)
        made = sum(usage.completion_tokens for usage in usages)
        cached = sum(usage.cached_tokens for usage in prompts)
        reasoning = sum(usage.reasoning_tokens for usage in usages)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }


def _text(reply: Reply) -> str:
    content = reply.message.content
    return content if isinstance(content, str) else ""


def _as_of_text(tokens: list[dict[str, Any]]) -> dict[str, Any]:
    """Log probabilities as completions have them, from those of a chat."""
    offsets, at = [], 0
    for token in tokens:
        offsets.append(at)
        at += len(token["token"])
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": [
            {one["token"]: one["logprob"] for one in token.get("top_logprobs") or []}
            for token in tokens
        ],
        "text_offset": offsets,
    }
