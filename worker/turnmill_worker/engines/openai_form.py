"""A turn as a request for an OpenAI-compatible server, and what came of it as an answer."""

from __future__ import annotations

import logging
from typing import Any, cast

from turnmill.reply import FinishReason, Usage
from turnmill.turn import Turn
from turnmill_worker.engines.base import Answer, InvalidRequest, TurnError
from turnmill_worker.engines.calls import name_calls
from turnmill_worker.engines.chunks import Chunks
from turnmill_worker.engines.openai_room import ServersRoom

log = logging.getLogger("turnmill.engines.openai")

_FINISHES: dict[str | None, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
}


class Form:
    """How one server wants to be asked. It learns: what a server refuses for its form is asked in another.

    `counts`: its streams can tell the number of tokens with each chunk. `stream_tools`: turns with tools are streamed,
    too. Else not, because servers parse tool calls more reliably in a whole text.
    """

    def __init__(self, model: str, counts: bool, *, stream_tools: bool) -> None:
        self._model, self._stream_tools = model, stream_tools
        self._cap = "max_tokens"
        self._options: dict[str, bool] | None = {"include_usage": True}
        if counts:
            self._options["continuous_usage_stats"] = True

    def fill(self, turn: Turn, room: ServersRoom) -> tuple[str, dict[str, Any]]:
        """The path below the base URL, and the body. Fields that a turn does not set are left to the server."""
        body = turn.model_dump(
            exclude_none=True, exclude={"model", "revision", "sampling", "sample"}
        )
        body |= turn.sampling.model_dump(exclude_none=True, exclude={"max_tokens"})
        chat = turn.prompt is None
        if not chat:
            del body["messages"]
            top = body.pop("top_logprobs", 0)
            if body.pop("logprobs", False):
                body["logprobs"] = top
        if room.send is not None:
            body[self._cap if chat else "max_tokens"] = room.send
            if "min_tokens" in body:  # more than max_tokens would be refused as a contradiction
                body["min_tokens"] = min(body["min_tokens"], room.send)
        elif not chat:
            body["max_tokens"] = None  # left out, it would be 16
        stream = self._stream_tools or not turn.tools
        body |= {"model": self._model, "stream": stream}
        if stream and self._options:
            body["stream_options"] = self._options
        return ("chat/completions" if chat else "completions"), body

    def adapt(self, turn: Turn, words: str) -> bool:
        """Whether a request that was refused with these words is to be asked in another form, from now on."""
        if "stream_options" in words and self._options:
            log.info("the server does not take stream_options: tokens are counted as they come")
            self._options = None
        elif "max_completion_tokens" in words and "instead" in words and self._cap == "max_tokens":
            self._cap = "max_completion_tokens"
        else:
            return False
        return True

    @staticmethod
    def sampling_of(body: dict[str, Any]) -> dict[str, Any]:
        """What of a body says how to sample."""
        others = ("messages", "prompt", "tools", "model", "stream", "stream_options")
        return {key: value for key, value in body.items() if key not in others}


def answer_of(turn: Turn, chunks: Chunks, room: ServersRoom) -> Answer:
    """Raises TurnError and InvalidRequest for an end that is no answer."""
    if chunks.finish == "content_filter":
        raise InvalidRequest("the server's content filter ended the answer")
    finish = _FINISHES.get(chunks.finish)
    if finish is None:
        raise TurnError(f"the server ended the answer with {chunks.finish!r}")
    message = chunks.message()
    name_calls(message, turn.hash)
    usage = _usage(chunks)
    limited_by, limit = None, None
    if finish == "length":
        limited_by, limit = room.met(usage.prompt_tokens, usage.completion_tokens)
    logprobs = None
    if turn.sampling.logprobs:
        logprobs = chunks.logprobs(turn.sampling.top_logprobs or 0)
    return Answer(message, finish, usage, limited_by, limit, logprobs)


def _usage(chunks: Chunks) -> Usage:
    """Of a server that does not count: the pieces that came."""
    said = chunks.usage
    prompt = said.get("prompt_tokens_details") or {}
    completion = said.get("completion_tokens_details") or {}
    return Usage(
        prompt_tokens=said.get("prompt_tokens") or 0,
        completion_tokens=cast(int, said.get("completion_tokens", chunks.pieces)) or 0,
        cached_tokens=prompt.get("cached_tokens") or said.get("prompt_cache_hit_tokens") or 0,
        reasoning_tokens=completion.get("reasoning_tokens") or said.get("reasoning_tokens") or 0,
    )
