"""The vLLM engine, in this process: its AsyncLLM, under the code of its own HTTP server.

A turn is a request to that server's chat layer, called without HTTP: what renders, samples and parses is what `vllm
serve` has. All of it runs on one thread with one loop, to which AsyncLLM is bound for its life: used from any other it does
not raise, it stalls. vllm_turn.py says where we step in; these files are the only ones that know vLLM.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import json
import logging
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import uvloop
from pydantic import ValidationError

from turnmill.reply import EngineIdentity, Usage
from turnmill.turn import Turn
from turnmill_worker.engines.adapters import adapter_of
from turnmill_worker.engines.base import (
    Answer,
    Capacity,
    EngineDied,
    EngineError,
    EngineSettings,
    InvalidRequest,
    Progress,
    TurnError,
)
from turnmill_worker.engines.calls import name_calls
from turnmill_worker.engines.growing import Cut
from turnmill_worker.engines.identity import plain_name
from turnmill_worker.engines.loop_thread import LoopThread
from turnmill_worker.engines.room import met
from turnmill_worker.engines.vllm_launch import arguments, launch
from turnmill_worker.engines.vllm_turn import Client, OneTurn, Renderer, unbounded

T = TypeVar("T")

log = logging.getLogger("turnmill.engines.vllm")

_PATIENCE = 30.0
"""Seconds that the engine may take to answer a question: it does so between two forward passes."""

_CLOSE_SECONDS = 5.0
"""How long the engine's processes may take to end before they are killed."""


def build(settings: EngineSettings) -> VLLMEngine:
    """Start vLLM with the arguments of `vllm serve`. Raises UsageError for arguments or a model that it does not take,
    EngineDied when its processes do not come up."""
    return VLLMEngine(settings)


class VLLMEngine:
    """One vLLM engine and the thread that runs its loop, and that its processes are bound to: they die when it does."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._dead: str | None = None
        self._closed = False
        self._probe: Future[Any] | None = None
        self._answers: dict[str, asyncio.Task[Answer]] = {}
        self._cut = Cut()
        parsed = arguments(settings)
        self._thread = LoopThread("vllm-engine-loop", self._gone)
        loop = uvloop.new_event_loop()
        try:
            launched = self._thread.call(partial(_run, loop, launch(parsed)))
        except BaseException:
            self._thread.run(loop)  # which ends what was begun on it
            self._thread.stop()
            raise
        self._client, self._chat, self._completions = launched
        self._given_name: str | None = (parsed.served_model_name or [None])[0]
        for serving in (self._chat, self._completions):
            serving.engine_client = Client(serving.engine_client)
            serving.online_renderer = Renderer(serving.online_renderer)
        self._identity = self._identify(parsed)
        requests = self._chat.models.lora_requests
        self.adapters = {name: str(request.lora_path) for name, request in requests.items()}
        self._thread.run(loop)
        # It ends with the engine, and whoever waits for the engine would be told by it.
        self._thread.call_soon(
            self._client.output_handler.add_done_callback,
            lambda _: self._die("its engine core ended"),
        )

    @property
    def identity(self) -> EngineIdentity:
        return self._identity

    @property
    def served_name(self) -> str:
        given = self._settings.served_name or self._given_name
        return given or plain_name(self._client.model_config.model)

    # What it can hold

    def capacity(self) -> Capacity:
        config = self._client.vllm_config
        ranks = config.parallel_config.data_parallel_size
        slots = config.scheduler_config.max_num_seqs * ranks
        wanted = self._settings.slots
        if wanted is not None and wanted > slots:
            log.warning("%d slots are wanted, vLLM runs %d requests at once", wanted, slots)
        blocks = config.cache_config.num_gpu_blocks
        return Capacity(
            slots=min(wanted or slots, slots),
            context=self._context,
            kv_tokens=blocks * config.cache_config.block_size * ranks if blocks else None,
        )

    @property
    def _context(self) -> int:
        return int(self._client.model_config.max_model_len)

    def running(self) -> int:
        """Requests that the engine has taken and not given back yet, all ranks and queues counted."""
        return 0 if self._dead else int(self._client.get_num_unfinished_requests())

    def _identify(self, parsed: Any) -> EngineIdentity:
        model = self._client.model_config
        return EngineIdentity(
            engine="vllm",
            version=importlib.metadata.version(_distribution()),
            model=model.model,
            revision=model.revision,
            dtype=str(model.dtype).removeprefix("torch."),
            template_digest=hashlib.sha256(self._template().encode()).hexdigest(),
            tool_parser=parsed.tool_call_parser if parsed.enable_auto_tool_choice else None,
            reasoning_parser=parsed.structured_outputs_config.reasoning_parser or None,
        )

    def _template(self) -> str:
        """The text of the chat template, or the name of what vLLM has built in for the model."""
        renderer = self._client.renderer
        text = self._chat.chat_template or getattr(renderer.tokenizer, "chat_template", None)
        if text is None:
            return type(renderer).__name__
        return text if isinstance(text, str) else json.dumps(text, sort_keys=True)

    # Turns

    async def answer(self, turn: Turn, rid: str, progress: Progress) -> Answer:
        task = asyncio.ensure_future(self._answer(turn, rid, progress))
        self._answers[rid] = task
        try:
            return await task
        finally:
            self._answers.pop(rid, None)

    async def abort(self, rid: str) -> None:
        if task := self._answers.get(rid):
            task.cancel()

    async def _answer(self, turn: Turn, rid: str, progress: Progress) -> Answer:
        self._check()
        serve, body = await asyncio.to_thread(self._request, turn, rid, progress)
        ours = OneTurn(
            turn,
            progress,
            self._context,
            tokenizer=self._client.renderer.tokenizer,
            cut=self._cut,
            plain=turn.prompt is not None or self._text_is_content(),
        )
        serving = self._serve(serve, body, ours)
        response = await asyncio.wrap_future(self._thread.submit(serving))
        return await asyncio.to_thread(self._made, turn, response, ours)

    def _request(self, turn: Turn, rid: str, progress: Progress) -> tuple[Any, Any]:
        """What answers a turn, and the turn as a request for it."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        fields = turn.model_dump(
            exclude_none=True, exclude={"model", "revision", "sampling", "sample"}
        )
        # max_tokens is left to us: vLLM would refuse one that is larger than the context.
        fields |= turn.sampling.model_dump(exclude_none=True, exclude={"max_tokens"})
        fields["priority"] = -progress.priority  # to vLLM the smaller is the first
        # To vLLM an adapter is a model by its own name.
        fields["model"] = adapter_of(turn, self) or self._chat.models.model_name()
        serve, kind = self._chat.create_chat_completion, ChatCompletionRequest
        if turn.prompt is not None:
            serve, kind = self._completions.create_completion, CompletionRequest
            del fields["messages"]
            top = fields.pop("top_logprobs", 0)
            if fields.pop("logprobs", False):
                fields["logprobs"] = top
        try:
            return serve, unbounded(kind)(request_id=rid, **fields)
        except ValidationError as error:
            raise InvalidRequest(_explain(error)) from None
        except Exception as error:
            raise InvalidRequest(f"{type(error).__name__}: {error}") from error

    async def _serve(self, serve: Any, body: Any, ours: OneTurn) -> Any:
        """On the loop thread: the response of vLLM's server. Being cancelled aborts the request."""
        from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
        from vllm.v1.engine.exceptions import EngineDeadError

        ours.enter()
        try:
            response = await serve(body)
        except EngineError:
            raise
        except EngineDeadError:
            self._die("its engine core ended")
            raise self._gone() from None
        except Exception as error:
            response = create_error_response(error)
            if not response.error.message:
                response.error.message = repr(error.__cause__ or error)
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # the server makes a response of that, too
            raise asyncio.CancelledError
        return response

    def _made(self, turn: Turn, response: Any, ours: OneTurn) -> Answer:
        """What a response says."""
        if not hasattr(response, "choices"):
            kind = InvalidRequest if response.error.code in _REFUSED else TurnError
            raise kind(response.error.message)
        (choice,), (output,) = response.choices, ours.output.outputs
        if choice.finish_reason not in ("stop", "tool_calls", "length"):
            raise TurnError(f"ended by the engine: {choice.finish_reason}")
        count = len(output.token_ids)
        length = count if output.finish_reason == "length" else None
        limited_by, limit = met(ours.space, length, len(ours.prompt))
        details = getattr(response.usage, "completion_tokens_details", None)
        return Answer(
            message=_message(turn, choice),
            finish=choice.finish_reason,
            usage=Usage(
                prompt_tokens=len(ours.prompt),
                completion_tokens=count,
                cached_tokens=ours.output.num_cached_tokens,
                reasoning_tokens=getattr(details, "reasoning_tokens", None) or 0,
            ),
            limited_by=limited_by,
            limit=limit,
            logprobs=self._logprobs(turn, choice, output),
        )

    def _logprobs(self, turn: Turn, choice: Any, output: Any) -> dict[str, Any] | None:
        """A chat's as they are; those of a prompt, which are columns, in a chat's shape."""
        made = choice.logprobs
        if turn.prompt is not None and made is not None:
            made = self._chat._create_chat_logprobs(
                output.token_ids,
                output.logprobs,
                self._client.renderer.tokenizer,
                turn.sampling.top_logprobs or 0,
            )
        logprobs: dict[str, Any] | None = made.model_dump() if made else None
        return logprobs

    def _text_is_content(self) -> bool:
        """Whether the text of an answer is its content where no tools are: no parser takes any of it out."""
        parser = self._chat.parser_cls
        if parser is None:
            return True
        tools = parser.tool_parser_cls
        by_text = tools is None or not getattr(tools, "engine_based_streaming", False)
        return parser.reasoning_parser_cls is None and by_text

    # Life and death

    async def healthy(self) -> bool:
        """Whether a question to vLLM's engine cores comes back in time."""
        self._check()
        if self._probe is None or self._probe.done():
            self._probe = self._thread.submit(self._client.is_sleeping())
        answer = asyncio.shield(asyncio.wrap_future(self._probe))
        try:
            await asyncio.wait_for(answer, _PATIENCE)
        except TimeoutError:
            return False
        except EngineDied:
            raise
        except Exception as error:
            raise EngineDied(f"vLLM's engine core: {error}") from error
        return True

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._thread.fail(self._gone)
        self._client.shutdown(timeout=_CLOSE_SECONDS)
        self._thread.stop()

    def _die(self, why: str) -> None:
        """On the loop: the engine is gone for good."""
        if self._dead or self._closed:
            return
        self._dead = f"vLLM died: {why}"
        log.error("%s", self._dead)
        self._thread.fail(self._gone)

    def _gone(self) -> EngineDied:
        return EngineDied(
            self._dead or ("the engine was closed" if self._closed else "vLLM's loop ended")
        )

    def _check(self) -> None:
        if self._dead or self._closed or not self._thread.alive:
            raise self._gone()


_REFUSED = range(400, 429)
"""HTTP's: the request is wrong. From 429 on it may be asked again."""


def _run(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    asyncio.set_event_loop(loop)
    return loop.run_until_complete(coroutine)


def _distribution() -> str:
    """The installed package: vLLM has builds by other names."""
    (name, *_) = importlib.metadata.packages_distributions().get("vllm", ["vllm"])
    return name


def _explain(error: ValidationError) -> str:
    """Where and what is wrong, each once, without the names of the validators between."""
    parts = {}
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        where = ".".join(str(step) for step in item["loc"] if "[" not in str(step))
        what = item["msg"].removeprefix("Value error, ")
        parts[f"{where}: {what}" if where else what] = True
    return "; ".join(parts)


def _message(turn: Turn, choice: Any) -> dict[str, Any]:
    """An assistant message, whose `content` is None only beside tool calls."""
    if turn.prompt is not None:
        return {"role": "assistant", "content": choice.text}
    message: dict[str, Any] = choice.message.model_dump(exclude_none=True)
    message["content"] = message.get("content") or (None if "tool_calls" in message else "")
    if reasoning := message.pop("reasoning", None):
        message["reasoning_content"] = reasoning
    name_calls(message, turn.hash)
    return message
