"""An OpenAI-compatible HTTP server on 127.0.0.1 with the scripted engine behind it, which misbehaves on demand.

It refuses what does not fit into its context, as vLLM does, and ends what its client hangs up on. It runs in a thread of
its own and speaks HTTP by hand, so that it can cut a connection wherever it likes.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from turnmill.errors import BadTurn
from turnmill.turn import Turn
from turnmill_worker.engines.base import EngineSettings, InvalidRequest, NoRoom, Progress
from turnmill_worker.engines.sim import build

VLLM = "This model's maximum context length is {context} tokens. However, your request has {prompt} input tokens."
CUT, HANG = "cut", "hang"


@dataclass
class Misbehaviour:
    """What becomes of one request: a `status` with a body and headers; or, after `pieces` of the stream, CUT or HANG,
    or any other bytes in its place."""

    status: int = 0
    body: Any = ""
    headers: dict[str, str] = field(default_factory=dict)
    pieces: int = 0
    then: str | bytes = b""


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


class _Cut(Exception):
    pass


class ScriptedServer:
    """`misbehave`: of the next requests for answers, one each. `requests`: all that came, over so many `connections`. `words`: how it refuses what is
    too long, by str.format with prompt, context and asked. `key`: what it wants. `card`: more of what its list says of its
    model. `other`: responses of other paths, (status, body). `deadly`: a text that takes it down, for a moment."""

    def __init__(self, *, context: int = 256, slots: int = 4, speed: float = 160.0) -> None:
        arguments = ("--context", str(context), "--latency", "0.002")
        arguments += ("--tokens-per-second", str(speed), "--answer-tokens", "12")
        self.misbehave: deque[Misbehaviour] = deque()
        self.requests: list[Request] = []
        self.key = ""
        self.words = VLLM
        self.context = context
        self.card: dict[str, Any] = {"owned_by": "vllm", "max_model_len": context}
        self.other: dict[str, tuple[int, Any]] = {
            "/version": (200, {"version": "9.9"}),
            "/health": (200, ""),
        }
        self.message: dict[str, Any] = {}
        self.deadly = ""
        self.connections = 0
        self.engine = build(EngineSettings(slots=slots, arguments=arguments))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server: asyncio.Server | None = None
        self._restarts: set[asyncio.Task[None]] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def asked(self) -> list[Request]:
        """The requests for answers."""
        return [request for request in self.requests if request.method == "POST"]

    def start(self) -> None:
        self._do(self._start())

    def stop(self) -> None:
        """Gone, as if it had been killed; `start` brings it back."""
        self._do(self._stop())

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def _stop(self) -> None:
        if self._server:
            self._server.close()
            self._server = None
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _restart(self) -> None:
        await self._stop()
        await asyncio.sleep(0.2)
        await self._start()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await _read(reader):
                self.requests.append(request)
                await self._respond(request, reader, writer)
        except (_Cut, OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()

    async def _respond(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            wrong = request.headers.get("authorization", "none")
            _send(writer, 401, _error(f"Incorrect API key provided: {wrong}"))
        elif request.method == "GET":
            card = {"id": "scripted", "object": "model", **self.card}
            known = {"/v1/models": (200, {"object": "list", "data": [card]}), **self.other}
            _send(writer, *known.get(request.path, (404, {"detail": "Not Found"})))
        elif self.deadly and self.deadly in json.dumps(request.body):
            task = asyncio.ensure_future(self._restart())
            self._restarts.add(task)
            task.add_done_callback(self._restarts.discard)
            await asyncio.sleep(10)
        else:
            bad = self.misbehave.popleft() if self.misbehave else Misbehaviour()
            if bad.status:
                _send(writer, bad.status, bad.body, bad.headers)
            else:
                await self._answer(request, bad, reader, writer)
        await writer.drain()

    async def _answer(
        self,
        request: Request,
        bad: Misbehaviour,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        progress, rid = Progress(), uuid4().hex
        try:
            turn = _turn(request.body)
            answering = asyncio.ensure_future(self.engine.answer(turn, rid, progress))
            hung_up = asyncio.ensure_future(reader.read(1))
            try:
                await asyncio.sleep(0)  # it begins, and has a prompt or refuses
                if answering.done():
                    answering.result()
                self._fits(turn, progress)
                send = None
                if request.body.get("stream"):
                    send = _Stream(writer, request, bad, hung_up)
                    while not (answering.done() or hung_up.done()):
                        await asyncio.wait(
                            {answering, hung_up}, timeout=0.005, return_when=asyncio.FIRST_COMPLETED
                        )
                        if (
                            not turn.sampling.stop
                            and not turn.sampling.logprobs
                            and progress.growing
                        ):
                            tokens = json.loads(progress.growing(send.sent).data)
                            for token in tokens:
                                await send.text(token)
                else:
                    await asyncio.wait({answering, hung_up}, return_when=asyncio.FIRST_COMPLETED)
                if hung_up.done():
                    raise _Cut
                answer = await answering
            finally:
                answering.cancel()
                hung_up.cancel()
                await asyncio.wait({hung_up})
        except NoRoom as error:
            _send(writer, 400, self._refusal(error.prompt_tokens, turn))
        except _TooMuch as error:
            _send(writer, 400, self._refusal(error.prompt, turn))
        except (InvalidRequest, BadTurn) as error:
            _send(writer, 400, _error(str(error)))
        else:
            usage = {
                "prompt_tokens": answer.usage.prompt_tokens,
                "completion_tokens": answer.usage.completion_tokens,
                "prompt_tokens_details": {"cached_tokens": 3},
            }
            message = {**answer.message, **self.message}
            logprobs = _logprobs(answer.logprobs, turn)
            if send:
                await send.end(message, answer.finish, usage, logprobs)
            else:
                choice = {"message": message, "finish_reason": answer.finish, "logprobs": logprobs}
                if turn.prompt is not None:
                    choice["text"] = choice.pop("message")["content"]
                _send(writer, 200, {"choices": [choice], "usage": usage})

    def _fits(self, turn: Turn, progress: Progress) -> None:
        asked = turn.sampling.max_tokens
        if progress.request and asked and progress.request["sampling"]["max_tokens"] < asked:
            raise _TooMuch(progress.request["prompt_tokens"])

    def _refusal(self, prompt: int, turn: Turn) -> Any:
        asked = turn.sampling.max_tokens or 0
        return _error(
            self.words.format(
                prompt=prompt, context=self.context, asked=asked, total=prompt + asked
            )
        )


class _TooMuch(Exception):
    def __init__(self, prompt: int) -> None:
        self.prompt = prompt


class _Stream:
    """The events of one answer, in HTTP's chunks."""

    def __init__(
        self,
        writer: asyncio.StreamWriter,
        request: Request,
        bad: Misbehaviour,
        hung_up: asyncio.Future[bytes],
    ) -> None:
        self.sent = 0
        self._writer, self._bad, self._hung_up = writer, bad, hung_up
        self._length = 0
        self._chat = request.path.endswith("chat/completions")
        self._counts = (request.body.get("stream_options") or {}).get("continuous_usage_stats")
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head.encode())
        self._raw(b": a comment\r\n\r\n")

    async def text(self, text: str) -> None:
        await self._misbehave()
        self.sent += 1
        usage = {"completion_tokens": self.sent} if self._counts else None
        await self._choice({"content": text}, usage=usage)

    async def end(
        self, message: dict[str, Any], finish: str, usage: dict[str, Any], logprobs: Any
    ) -> None:
        rest = {key: value for key, value in message.items() if key != "role"}
        if self.sent:
            rest["content"] = message["content"][self._length :]
        await self._misbehave()
        await self._choice(rest, logprobs=logprobs)
        await self._choice({}, finish_reason=finish)
        self._event({"choices": [], "usage": usage})
        self._raw(b"data: [DONE]\n\n")
        self._writer.write(b"0\r\n\r\n")

    async def _choice(self, delta: dict[str, Any], usage: Any = None, **more: Any) -> None:
        self._length += len(delta.get("content") or "")
        choice = {"delta": delta} if self._chat else {"text": delta.get("content") or ""}
        self._event({"choices": [{"index": 0, **choice, **more}], "usage": usage})
        await self._writer.drain()

    async def _misbehave(self) -> None:
        bad = self._bad
        if not bad.then or self.sent < bad.pieces:
            return
        if bad.then == HANG:
            await asyncio.wait({self._hung_up})
        if isinstance(bad.then, bytes):
            self._raw(bad.then)
            await self._writer.drain()
        raise _Cut

    def _event(self, data: Any) -> None:
        # A line separator, raw, as JSON may have it: only LF ends a line of a stream.
        self._raw(f"data: {json.dumps(data, ensure_ascii=False)}\r\n\r\n".encode())

    def _raw(self, data: bytes) -> None:
        self._writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _turn(body: dict[str, Any]) -> Turn:
    fields = {key: body[key] for key in Turn.model_fields if key in body and key != "model"}
    others = {"model", "stream", "stream_options", *Turn.model_fields}
    sampling = {key: value for key, value in body.items() if key not in others}
    if "prompt" in body and "logprobs" in sampling:
        sampling["top_logprobs"], sampling["logprobs"] = sampling["logprobs"], True
    if "max_completion_tokens" in sampling:
        sampling["max_tokens"] = sampling.pop("max_completion_tokens")
    return Turn.from_body({"model": "sim", "sampling": sampling, **fields})


def _logprobs(logprobs: Any, turn: Turn) -> Any:
    """Of a completion: columns."""
    if logprobs is None or turn.prompt is None:
        return logprobs
    content = logprobs["content"]
    return {
        "tokens": [token["token"] for token in content],
        "token_logprobs": [token["logprob"] for token in content],
        "top_logprobs": [
            {top["token"]: top["logprob"] for top in token["top_logprobs"]} for token in content
        ],
    }


def _error(words: str) -> dict[str, Any]:
    return {"error": {"message": words, "type": "BadRequestError", "code": 400}}


def _send(
    writer: asyncio.StreamWriter, status: int, body: Any, headers: dict[str, str] | None = None
) -> None:
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(data)}"]
    kind = "text/plain" if isinstance(body, str) else "application/json"
    lines += [
        f"{name}: {value}" for name, value in {"Content-Type": kind, **(headers or {})}.items()
    ]
    writer.write("\r\n".join([*lines, "", ""]).encode() + data)


async def _read(reader: asyncio.StreamReader) -> Request | None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
    method, path, _ = head[0].split(" ", 2)
    pairs = [line.split(": ", 1) for line in head[1:] if line]
    headers = {name.lower(): value for name, value in pairs}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(method, path, headers, json.loads(body) if body else {})
