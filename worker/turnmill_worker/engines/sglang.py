"""The SGLang engine, in this process: its offline `Engine`, with the chat layer of its HTTP server.

SGLang is pinned to one minor version, because an offline engine has no public chat interface: the
names used here that begin with an underscore, and the limits copied from its scheduler, are that
version's. This is the only file that knows them, and tests/engines/test_sglang.py fails when they move.

A turn goes through four steps. SGLang's chat layer makes the request (prompt ids, sampling, grammar),
in a thread; we check its length; the engine answers, on the loop thread; SGLang's chat layer makes
message, reasoning, tool calls and logprobs of the text, in a thread again.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import hashlib
import importlib.metadata
import io
import json
import logging
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError

from turnmill.errors import UsageError
from turnmill.reply import EngineIdentity, Usage
from turnmill.turn import Turn, explain
from turnmill_worker.engines.adapters import adapter_of
from turnmill_worker.engines.arguments import check_path, first_line, last_line
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
from turnmill_worker.engines.identity import plain_name, prompt_digest
from turnmill_worker.engines.kept import can_be_told, can_go_on
from turnmill_worker.engines.loop_thread import LoopThread
from turnmill_worker.engines.room import Room, met, room
from turnmill_worker.engines.sglang_growing import GoingOn, Grown, remembers_nothing
from turnmill_worker.engines.sglang_parsers import complete_parsers
from turnmill_worker.engines.sglang_seeds import Seeds

T = TypeVar("T")

log = logging.getLogger("turnmill.engines.sglang")

_STREAM_INTERVAL = 32
"""Tokens between two looks at a growing answer. Fewer only wake the loop more often."""

_PATIENCE = 30.0
"""Seconds that the engine may take to tell its state: it does so between two forward passes."""

_THREADS = 8
"""For rendering and parsing: mostly one at a time, because of the interpreter's lock."""


def build(settings: EngineSettings) -> SGLangEngine:
    """Start SGLang with its own command line arguments. Raises UsageError for arguments or a model
    that it does not take, EngineDied when its processes do not come up. Call it on the main thread:
    only there can the signal be caught by which SGLang says that a process of its own has died."""
    engine = SGLangEngine(settings)
    engine.start()
    return engine


class SGLangEngine:
    """One SGLang engine and the thread that runs its loop. `start` lets the loop run; before, only
    `capacity`, `identity` and `close` work.

    The engine is built on its loop thread, not on the main thread: SGLang would otherwise install
    its own handlers for SIGTERM and SIGQUIT, which end the process, and take the main thread's event
    loop for its own. And its processes are bound to the thread that built it: they die when it does.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._dead: str | None = None
        self._closed = False
        self._probe: Future[Any] | None = None
        self._answers: dict[str, asyncio.Task[Answer]] = {}
        with _root_logger_kept():
            arguments = _arguments(settings)
            logging.getLogger("sglang").setLevel(arguments.log_level.upper())
            self._thread = LoopThread("sglang-engine-loop", self._gone)
            self._forget_signal = _on_sigquit(
                lambda: self._thread.call_soon(self._die, "one of its processes failed or hangs")
            )
            try:
                self._engine = self._thread.call(lambda: _launch(arguments))
            except BaseException:
                self._thread.stop()
                self._forget_signal()
                raise
        self._manager = self._engine.tokenizer_manager
        complete_parsers(arguments, self._manager)
        self._chat = self._manager.serving_chat_class(self._manager, self._engine.template_manager)
        self._completions = _completions(self._manager, self._engine.template_manager)
        self._workers = ThreadPoolExecutor(_THREADS, thread_name_prefix="sglang-chat")
        self._identity = self._identify()
        loaded = self._manager.lora_ref_cache
        self.adapters = {name: str(adapter.lora_path) for name, adapter in loaded.items()}
        self._context, self._max_prompt = self._limits()
        self._seeds = Seeds(used=arguments.enable_deterministic_inference)
        self._going_on = GoingOn(self._manager, self._end_of_reasoning())

    def start(self) -> None:
        """Let the loop run."""
        self._thread.run(self._engine.loop)
        self._thread.call_soon(self._watch)

    @property
    def identity(self) -> EngineIdentity:
        return self._identity

    @property
    def served_name(self) -> str:
        if self._settings.served_name:
            return self._settings.served_name
        return plain_name(self._manager.served_model_name)

    # What it can hold

    def capacity(self) -> Capacity:
        """What SGLang says it can hold, now. Blocks for milliseconds. Raises EngineDied."""
        state, *_ = self._now(self._manager.get_internal_state())
        ranks = self._engine.server_args.dp_size
        slots = state["effective_max_running_requests_per_dp"] * ranks
        wanted = self._settings.slots
        if wanted is not None and wanted > slots:
            log.warning("%d slots are wanted, SGLang runs %d requests at once", wanted, slots)
        return Capacity(
            slots=min(wanted or slots, slots),
            context=self._context,
            kv_tokens=state["memory_usage"]["token_capacity"] * ranks,
        )

    def running(self) -> int:
        """Requests that the engine has taken and not given back yet, all ranks and queues counted."""
        return len(self._manager.rid_to_state)

    def _limits(self) -> tuple[int, int]:
        """The most tokens of prompt and answer together, and of the prompt alone.

        Both are smaller than the context length says. SGLang's scheduler (`TpModelWorker.get_worker_info`,
        `validate_input_length`, `init_req_max_new_tokens`) refuses a prompt of max_req_input_len, which
        is 6 less than the context or the cache, whichever is smaller; and it cuts an answer, without a
        word, to 2 tokens less than would fit. Its tokenizer manager refuses, before, what does not fit
        beside the slots reserved for speculation. What we let through must never be cut or refused.
        """
        scheduler = self._engine._scheduler_init_result.scheduler_infos[0]
        beside_speculation = self._manager.context_len - self._manager.num_reserved_tokens
        # A prompt fills whole pages of the cache, and one more page is kept free.
        in_cache = scheduler["max_total_num_tokens"] - 2 * self._manager.config_value("page_size")
        total = min(scheduler["max_req_input_len"] + 4, beside_speculation, in_cache)
        return total, min(scheduler["max_req_input_len"], beside_speculation, in_cache) - 1

    def _end_of_reasoning(self) -> list[int]:
        """The tokens that end the reasoning, where SGLang counts what comes before."""
        from sglang.srt.parser.reasoning_parser import ReasoningParser

        if not self._chat.reasoning_parser:
            return []
        tokenizer = self._manager.tokenizer
        parser = ReasoningParser(
            model_type=self._chat.reasoning_parser, stream_reasoning=False, tokenizer=tokenizer
        )
        return list(parser.detector.get_think_end_token_ids(tokenizer) or ())

    def _identify(self) -> EngineIdentity:
        model = self._manager.model_config
        return EngineIdentity(
            engine="sglang",
            version=importlib.metadata.version("sglang"),
            model=self._manager.model_path,
            revision=self._engine.server_args.revision,
            dtype=str(model.dtype).removeprefix("torch."),
            template_digest=hashlib.sha256(self._template().encode()).hexdigest(),
            tool_parser=self._chat.tool_call_parser or None,
            reasoning_parser=self._chat.reasoning_parser or None,
        )

    def _template(self) -> str:
        """The text of the chat template, or the name of the one that SGLang has built in."""
        manager = self._engine.template_manager
        built_in = self._chat.chat_encoding_spec or manager.chat_template_name
        if built_in:
            return str(built_in)
        source = self._manager.processor or self._manager.tokenizer
        text = getattr(source, "chat_template", None) or self._manager.tokenizer.chat_template
        return text if isinstance(text, str) else json.dumps(text, sort_keys=True)

    # The engine's own interface, from any thread and any loop

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """SGLang's `Engine.async_generate`, waited for: the engine's own `generate` raises while its
        loop runs. Not for the loop thread. No streaming. Raises what SGLang raises, and EngineDied."""
        return self._generate(*args, **kwargs).result()

    async def agenerate(self, *args: Any, **kwargs: Any) -> Any:
        """SGLang's `Engine.async_generate`, from any event loop. Cancelling it aborts the request."""
        return await asyncio.wrap_future(self._generate(*args, **kwargs))

    def _generate(self, *args: Any, **kwargs: Any) -> Future[Any]:
        if kwargs.get("stream"):
            raise ValueError("stream=True gives an iterator that only the engine's loop can run")
        return self._thread.submit(self._engine.async_generate(*args, **kwargs))

    def _now(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine of the engine: a plain call before the loop runs."""
        if self._thread.running:
            return self._thread.submit(coroutine).result(_PATIENCE)
        loop: asyncio.AbstractEventLoop = self._engine.loop
        return self._thread.call(lambda: loop.run_until_complete(coroutine))

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
        request, body, prompt = await self._in_thread(self._render, turn, rid)
        space = room(
            len(prompt),
            turn.sampling.max_tokens,
            context=self._context,
            max_prompt=self._max_prompt,
        )
        self._fit(request.sampling_params, space)
        grown = Grown()
        if can_go_on(turn) and remembers_nothing(request):
            if progress.kept:
                most = min(space.max_tokens - 1, self._max_prompt - len(prompt))
                grown.before = await self._in_thread(
                    self._going_on.taken_over, turn, request, progress.kept, most
                )
                grown.text_before = await self._in_thread(
                    self._going_on.text_of, request, prompt, grown.before
                )
            progress.resumed_at = len(grown.before)
            progress.growing = grown.part
            # A reasoning parser takes the beginning of the text for itself.
            if can_be_told(turn) and not self._chat.reasoning_parser:
                cut = partial(self._going_on.cut, request)
                progress.telling = grown.telling(turn.sampling.stop or (), cut)
                if progress.streamed:  # as SGLang's HTTP server streams
                    request.sampling_params["stream_interval"] = None
        progress.now_rendered(
            {
                "endpoint": "engine.generate",
                "prompt_tokens": len(prompt),
                "prompt_digest": prompt_digest(prompt),
                "sampling": {k: v for k, v in request.sampling_params.items() if v is not None},
            }
        )
        if grown.before:
            request.input_ids = prompt + [token.id for token in grown.before]
            request.sampling_params["max_new_tokens"] -= len(grown.before)
        progress.now_sent()
        receiving = self._receive(request, progress, grown)
        output = await asyncio.wrap_future(self._thread.submit(receiving))
        if grown.before:
            output = await self._in_thread(self._going_on.whole, request, prompt, grown, output)
        return await self._in_thread(self._parse, turn, body, output, space)

    def _render(self, turn: Turn, rid: str) -> tuple[Any, Any, list[int]]:
        """SGLang's request for a turn, as its HTTP server would make it; the request that it was
        made of; and the prompt's token ids."""
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest

        fields = turn.model_dump(
            exclude_none=True, exclude={"model", "revision", "sampling", "sample"}
        )
        fields["lora_path"] = adapter_of(turn, self)  # its name: SGLang knows where it came from
        # max_tokens is left to us: SGLang would refuse one that is larger than the context.
        fields |= turn.sampling.model_dump(exclude_none=True, exclude={"max_tokens"})
        serving, kind = self._chat, ChatCompletionRequest
        if turn.prompt is not None:
            serving, kind = self._completions, CompletionRequest
            del fields["messages"]
            top = fields.pop("top_logprobs", 0)
            if fields.pop("logprobs", False):
                fields["logprobs"] = top
        try:
            # Its own name for the model: any other it takes apart, and what follows a colon is an adapter to it.
            body = kind(model=self._manager.served_model_name, rid=rid, **fields)
            if refusal := serving._validate_request(body):
                raise InvalidRequest(refusal)
            request, body = serving._convert_to_internal_request(body)
            if turn.prompt is not None:
                request.input_ids, request.text = self._prompt_of(request), None
            self._seeds.settle(turn, request.sampling_params)
        except ValidationError as error:
            raise InvalidRequest(explain(error)) from None
        except (EngineError, MemoryError, RuntimeError):
            raise
        except ValueError as error:  # the template's own words, among others
            raise InvalidRequest(str(error)) from error
        except Exception as error:
            raise InvalidRequest(f"{type(error).__name__}: {error}") from error
        # Chunks that are not the whole answer so far would have to be put together here.
        request.stream = not self._manager.incremental_streaming_output
        request.sampling_params["stream_interval"] = _STREAM_INTERVAL
        return request, body, self._prompt_of(request)

    def _prompt_of(self, request: Any) -> list[int]:
        """The prompt's token ids. For a request with images SGLang wants text, into which it will put
        the images' tokens: then these are the least that there will be."""
        if request.input_ids is not None:
            ids: list[int] = request.input_ids
            return ids
        encoded: list[int] = self._manager.tokenizer.encode(request.text)
        return encoded

    @staticmethod
    def _fit(sampling: dict[str, Any], space: Room) -> None:
        sampling["max_new_tokens"] = space.max_tokens
        if space.limited_by == "context":
            # A cut below the least that was asked for would be refused as a contradiction.
            sampling["min_new_tokens"] = min(sampling["min_new_tokens"] or 0, space.max_tokens)

    async def _receive(self, request: Any, progress: Progress, grown: Grown) -> dict[str, Any]:
        """On the loop thread: the engine's final output. Being cancelled aborts the request."""
        output: dict[str, Any] = {}
        chunks = self._manager.generate_request(request, None)
        try:
            async with contextlib.aclosing(chunks):
                async for output in chunks:
                    made = output["meta_info"].get("completion_tokens", 0)
                    if output["meta_info"]["finish_reason"] is None:
                        grown.take(output)
                    progress.moved(len(grown.before) + made)
        except Exception as error:
            raise _turn_error(error) from error
        return output

    def _parse(self, turn: Turn, body: Any, output: dict[str, Any], space: Room) -> Answer:
        """The answer as SGLang's HTTP server would give it."""
        meta = output["meta_info"]
        finish = meta["finish_reason"]
        if finish["type"] == "abort":
            error = InvalidRequest if finish.get("status_code") == 400 else TurnError
            raise error(finish.get("message") or "aborted by the engine")
        length = finish.get("length")
        limited_by, limit = met(space, length, meta["prompt_tokens"])
        usage = Usage(
            prompt_tokens=meta["prompt_tokens"],
            completion_tokens=meta["completion_tokens"],
            cached_tokens=meta.get("cached_tokens") or 0,
            reasoning_tokens=meta.get("reasoning_tokens") or 0,
        )
        if turn.prompt is not None:
            logprobs = None
            if turn.sampling.logprobs:
                logprobs = self._chat._process_response_logprobs(output).model_dump()
            text = {"role": "assistant", "content": output["text"]}
            return Answer(text, finish["type"], usage, limited_by, limit, logprobs)
        response = self._chat._build_chat_response(body, [output], int(time.time()))
        if not hasattr(response, "choices"):
            raise TurnError(_refusal(response))
        choice = response.choices[0]
        message = choice.message.model_dump(exclude_none=True)
        name_calls(message, turn.hash)
        return Answer(
            message=message,
            finish=choice.finish_reason,
            usage=usage,
            limited_by=limited_by,
            limit=limit,
            logprobs=choice.logprobs.model_dump() if choice.logprobs else None,
        )

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._workers, function, *args)
        except EngineError:
            raise
        except Exception as error:
            self._check()  # closed meanwhile, there is no pool
            raise TurnError(f"{type(error).__name__}: {error}") from error

    # Life and death

    async def healthy(self) -> bool:
        """Whether a question to SGLang's scheduler comes back in time, through all its processes."""
        self._check()
        # One question at a time: SGLang would keep the next in line behind it.
        if self._probe is None or self._probe.done():
            self._probe = self._thread.submit(self._manager.get_internal_state())
        answer = asyncio.shield(asyncio.wrap_future(self._probe))
        try:
            return bool(await asyncio.wait_for(answer, _PATIENCE))
        except TimeoutError:
            return False

    def close(self) -> None:
        if self._closed:
            return
        if not self._thread.running:
            self.start()  # what it has begun on its loop can be ended only there
        self._closed = True
        self._thread.fail(self._gone)
        self._thread.call_soon(self._hang_up)
        # This kills all children of this process, not only SGLang's, and waits for them. SGLang has
        # it called again at exit, where it would hit children that came later.
        self._engine.shutdown()
        atexit.unregister(self._engine.shutdown)
        for _, process in self._processes():
            process.join(_PATIENCE)
        self._thread.stop()
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._forget_signal()

    def _watch(self) -> None:
        """On the loop: notice the death of a process of SGLang's in the moment that it happens. SGLang
        itself looks once a second, and sends this process SIGQUIT; futures it leaves waiting."""
        for name, process in self._processes():
            self._engine.loop.add_reader(process.sentinel, self._process_ended, name, process)

    def _processes(self) -> list[tuple[str, Any]]:
        watchdog = self._manager._subprocess_watchdog
        return list(zip(watchdog._names, watchdog._processes, strict=True))

    def _process_ended(self, name: str, process: Any) -> None:
        self._engine.loop.remove_reader(process.sentinel)
        process.join(1.0)  # its exit code comes a moment after its end
        self._die(f"its process {name} ended with exit code {process.exitcode}")

    def _die(self, why: str) -> None:
        """On the loop: the engine is gone for good."""
        if self._dead or self._closed:
            return
        self._dead = f"SGLang died: {why}"
        log.error("%s", self._dead)
        self._manager.rid_to_state.clear()  # nobody is left who could be told of an abort
        self._thread.fail(self._gone)

    def _hang_up(self) -> None:
        """On the loop: let go of the engine's processes, whether they live or not."""
        for _, process in self._processes():
            self._engine.loop.remove_reader(process.sentinel)
        self._manager.rid_to_state.clear()
        # What is not sent yet has no reader any more, and the socket would wait for one.
        self._manager.send_to_scheduler.close(linger=0)

    def _gone(self) -> EngineDied:
        return EngineDied(
            self._dead or ("the engine was closed" if self._closed else "SGLang's loop ended")
        )

    def _check(self) -> None:
        if self._dead or self._closed or not self._thread.alive:
            raise self._gone()


def _arguments(settings: EngineSettings) -> Any:
    """SGLang's ServerArgs. Raises UsageError with SGLang's own words, in one line."""
    try:
        from sglang.srt.server_args import prepare_server_args
    except ImportError as error:
        raise UsageError(
            f"SGLang cannot be imported (pip install 'turnmill[sglang]'): {error}"
        ) from None
    check_path("engine sglang: --model", settings.model)
    argv = list(settings.arguments)
    if settings.revision is not None:
        argv = ["--revision", settings.revision, *argv]
    if settings.model is not None:
        argv = ["--model-path", settings.model, *argv]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            arguments = prepare_server_args(argv)
    except SystemExit as exit:
        if not exit.code:  # --help
            raise
        raise UsageError(
            f"engine sglang: {last_line(said.getvalue()).removeprefix('sglang serve: error: ')}"
        ) from None
    except Exception as error:
        raise UsageError(f"engine sglang: {first_line(error)}") from error
    if arguments.allow_auto_truncate:
        raise UsageError("engine sglang: --allow-auto-truncate: prompts are never cut silently")
    if arguments.skip_tokenizer_init:
        raise UsageError("engine sglang: --skip-tokenizer-init: messages need a tokenizer")
    for adapter in arguments.lora_paths or ():  # NAME=PATH, PATH, or a JSON object
        path = adapter.get("lora_path") if isinstance(adapter, dict) else adapter.split("=", 1)[-1]
        check_path("engine sglang: --lora-paths", path)
    return arguments


def _completions(manager: Any, templates: Any) -> Any:
    from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion

    return OpenAIServingCompletion(manager, templates)


def _launch(arguments: Any) -> Any:
    """On the loop thread: the engine, its processes running."""
    from sglang.srt.entrypoints.engine import Engine

    others = set(multiprocessing.active_children())
    try:
        engine = Engine(server_args=arguments)
    except Exception as error:
        # Those that it has started die with this thread, but not while they are still importing.
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
            process.join()
        if isinstance(error, RuntimeError) and "nitialization" in str(error):
            raise EngineDied(f"SGLang did not start: {first_line(error)}") from error
        raise UsageError(f"engine sglang: {first_line(error)}") from error
    if engine.tokenizer_manager is None:
        # A node of rank above 0 is inside Engine() for as long as rank 0 lives.
        raise EngineDied("the node of rank 0 has ended, and this one with it")
    return engine


def _on_sigquit(callback: Callable[[], object]) -> Callable[[], None]:
    """Have a callback called when SGLang's watchdogs send SIGQUIT, which would end the process; what
    is returned undoes it."""
    if threading.current_thread() is not threading.main_thread():
        log.warning("not built on the main thread: when SGLang dies, this process dies at once")
        return lambda: None
    before = signal.signal(signal.SIGQUIT, lambda _number, _frame: callback())

    def undo() -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGQUIT, before or signal.SIG_DFL)

    return undo


@contextlib.contextmanager
def _root_logger_kept() -> Iterator[None]:
    """SGLang sets the root logger up anew when it starts. A program that has done so itself keeps its
    own; one that has not gets SGLang's."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    if handlers:
        root.handlers.clear()  # or they would be closed
    try:
        yield
    finally:
        if handlers:
            root.handlers[:] = handlers
            root.setLevel(level)


def _turn_error(error: Exception) -> EngineError:
    """What SGLang raised for one request: it refuses with ValueError, TypeError, or HTTP's 400."""
    status = getattr(error, "status_code", None)
    text = str(getattr(error, "detail", None) or error)
    if status == 400 or isinstance(error, ValueError | TypeError):
        return InvalidRequest(text)
    return TurnError(text if status else f"{type(error).__name__}: {text}")


def _refusal(response: Any) -> str:
    """The words of one of SGLang's error responses."""
    if hasattr(response, "message"):
        return str(response.message)
    return str(json.loads(response.body)["message"])
