"""A turn on its way through the code of vLLM's HTTP server, which renders, samples and parses as for one of its own
requests. We step in twice: once the prompt is there, to see whether it fits; and where the engine is called, to watch the
answer grow and to let it go on from what an earlier try has kept."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator
from contextvars import ContextVar
from functools import partial
from typing import Any

from turnmill.turn import Turn
from turnmill_worker.engines.base import InvalidRequest, Progress
from turnmill_worker.engines.growing import Cut, taken_over, text_of
from turnmill_worker.engines.identity import prompt_digest
from turnmill_worker.engines.kept import can_be_told, can_go_on
from turnmill_worker.engines.room import Room, room
from turnmill_worker.engines.vllm_growing import Grown, remembers_nothing

_STREAM_INTERVAL = 32
"""Tokens between two looks at a growing answer that nobody reads. Fewer only wake the loop more often."""

_ours: ContextVar[OneTurn | None] = ContextVar("turn", default=None)


class OneTurn:
    """One turn, and what is known of it after each step: `prompt` and `space`, then `output`, vLLM's last. `plain`: the text
    of an answer is its content, unless there are tools."""

    def __init__(
        self,
        turn: Turn,
        progress: Progress,
        context: int,
        *,
        tokenizer: Any,
        cut: Cut,
        plain: bool,
    ) -> None:
        self.prompt: list[int] = []
        self.space = Room(0, "context", context)
        self.output: Any = None
        self._turn, self._progress, self._context = turn, progress, context
        self._tokenizer, self._cut, self._plain = tokenizer, cut, plain

    def enter(self) -> None:
        """What this task does from now on is for this turn."""
        _ours.set(self)

    def fit(self, request: Any, prompt: Any) -> None:
        """Find the room for the answer, and tell vLLM's request of it. Raises NoRoom."""
        ids = prompt.get("prompt_token_ids")
        if ids is None:
            raise InvalidRequest("the model takes no prompt of tokens")
        asked = self._turn.sampling.max_tokens
        self.prompt = list(ids)
        self.space = room(len(ids), asked, context=self._context)
        # Where nothing is asked for, a chat is left to the model's own defaults. A prompt would get OpenAI's 16 tokens.
        if asked is not None or self._turn.prompt is not None:
            request.max_tokens = self.space.max_tokens
        if self.space.limited_by == "context":
            # A cut below the least that was asked for would be refused as a contradiction.
            request.min_tokens = min(request.min_tokens or 0, self.space.max_tokens)

    async def generate(
        self, client: Any, prompt: Any, params: Any, *args: Any, **options: Any
    ) -> AsyncIterator[Any]:
        """In the place of the engine's own: the answer's last output alone."""
        from vllm.sampling_params import RequestOutputKind

        if params.max_tokens < self.space.max_tokens:  # by the model's or the server's own settings
            self.space = Room(params.max_tokens, "output", params.max_tokens)
        progress, grown = self._progress, Grown(params.stop or [], params.logprobs or 0)
        decode = partial(self._tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
        params.output_kind = RequestOutputKind.DELTA
        params.stream_interval = None if progress.streamed else _STREAM_INTERVAL
        if can_go_on(self._turn) and remembers_nothing(prompt, params):
            if progress.kept:
                await asyncio.to_thread(self._take_over, grown, decode, params)
            progress.resumed_at = len(grown.before)
            progress.growing = grown.part
            if can_be_told(self._turn) and self._plain:
                progress.telling = grown.telling(params.stop or (), partial(self._cut, decode))
        progress.now_rendered(
            {
                "endpoint": "engine.generate",
                "prompt_tokens": len(self.prompt),
                "prompt_digest": prompt_digest(self.prompt),
                "sampling": _described(params) | self._forgotten(),
            }
        )
        if grown.before:
            ids = self.prompt + [token.id for token in grown.before]
            prompt = {**prompt, "prompt_token_ids": ids}
            params.max_tokens -= len(grown.before)
        progress.now_sent()
        async with contextlib.aclosing(
            client.generate(prompt, params, *args, **options)
        ) as outputs:
            async for output in outputs:
                grown.take(output.outputs[0])
                progress.moved(grown.count)
                if output.finished:
                    self.output = grown.whole(output, self.prompt, self._tokenizer)
                    yield self.output

    def _forgotten(self) -> dict[str, Any]:
        """What vLLM takes out of its parameters for greedy answers, which it does not change."""
        return self._turn.sampling.model_dump(
            exclude_none=True, include={"top_p", "top_k", "min_p"}
        )

    def _take_over(self, grown: Grown, decode: Any, params: Any) -> None:
        most = self.space.max_tokens - 1
        grown.before = taken_over(self._progress.kept, most, decode, params.stop or ())
        grown.text_before = text_of(decode, self.prompt, grown.before)


class Client:
    """The engine as vLLM's server code sees it."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        ours = _ours.get()
        outputs: AsyncIterator[Any] = (
            ours.generate(self._client, *args, **options)
            if ours
            else self._client.generate(*args, **options)
        )
        return outputs


class Renderer:
    """What makes prompts, as vLLM's server code sees it."""

    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    async def render_chat(self, request: Any) -> Any:
        rendered = await self._renderer.render_chat(request)
        if isinstance(rendered, tuple):  # and no refusal
            self._fit(request, rendered[1])
        return rendered

    async def render_completion(self, request: Any) -> Any:
        rendered = await self._renderer.render_completion(request)
        if isinstance(rendered, list):
            self._fit(request, rendered)
        return rendered

    @staticmethod
    def _fit(request: Any, prompts: list[Any]) -> None:
        if ours := _ours.get():
            (prompt,) = prompts
            ours.fit(request, prompt)


@functools.cache
def unbounded(kind: Any) -> Any:
    """A kind of request of vLLM's whose prompt is made whole, however long it is: vLLM's renderer would stop in the middle, and
    we could not say by how much it does not fit."""

    class Unbounded(kind):  # type: ignore[misc]
        def build_tok_params(self, model_config: Any) -> Any:
            params = super().build_tok_params(model_config)
            return dataclasses.replace(params, max_total_tokens=None)

    return Unbounded


def _described(params: Any) -> dict[str, Any]:
    """Sampling parameters as they go into a trace."""
    described: dict[str, Any] = {}
    for name in params.__struct_fields__:
        value = getattr(params, name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = dataclasses.asdict(value).items()
            value = {key: item for key, item in fields if item and not key.startswith("_")}
        if not name.startswith("_") and name not in _NOT_SAMPLING and value not in (None, [], {}):
            described[name] = value
    return described


_NOT_SAMPLING = {"output_kind", "stream_interval", "skip_clone", "output_text_buffer_length"}
