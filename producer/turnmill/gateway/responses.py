"""From replies to OpenAI's responses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from turnmill.gateway.requests import Question
from turnmill.reply import Reply, Usage


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
            told: dict[str, Any] = {"index": index, "logprobs": reply.logprobs}
            if self._question.chat:
                message = reply.message.model_dump(exclude_none=True)
                told["message"] = {"content": None, "refusal": None} | message
            else:
                told["text"] = _text(reply)
            choices.append(told | {"finish_reason": reply.finish_reason})
        usage = usage_of([reply.usage for reply in replies])
        return self._head | {"choices": choices, "usage": usage}

    # Chunks

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk before the first text."""
        if not self._question.chat:
            return None
        return self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}})

    def piece(
        self, index: int, text: str, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        told: dict[str, Any] = {"index": index, "logprobs": logprobs}
        told |= {"delta": {"content": text}} if self._question.chat else {"text": text}
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
        counts = usage_of([reply.usage for reply in replies])
        return self._chunk() | {"choices": [], "usage": counts}

    def _chunk(self, choice: dict[str, Any] | None = None) -> dict[str, Any]:
        head = dict(self._head)
        if self._question.chat:
            head["object"] = "chat.completion.chunk"
        plain = {"logprobs": None, "finish_reason": None}
        chunk = head | {"choices": [plain | (choice or {})]}
        return chunk | {"usage": None} if self._question.include_usage else chunk


def _text(reply: Reply) -> str:
    content = reply.message.content
    return content if isinstance(content, str) else ""


def usage_of(usages: Sequence[Usage]) -> dict[str, Any]:
    """Counts of all choices; their prompt is one and counts once, as OpenAI does it."""
    prompt = usages[0].prompt_tokens
    made = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": usages[0].cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": sum(usage.reasoning_tokens for usage in usages)
        },
    }
