"""A server that speaks OpenAI's API as the engine: `sglang serve`, `vllm serve`, llama.cpp's, or a hosted one.

The server renders, samples and parses; here is only what makes it an engine that may be trusted with a queue. What
passes (too many requests, a fault, a cut connection) is asked again, what the turn itself is to blame for is told apart
from it, and a server that is away costs no turn its tries. All of it runs on a loop of its own, in a thread, so that
the worker's loop does not wait while streams are read.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import logging
import math
import os
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import uvloop

from turnmill.errors import UsageError
from turnmill.reply import EngineIdentity
from turnmill.turn import Turn
from turnmill_worker.engines.adapters import NO_ADAPTERS
from turnmill_worker.engines.arguments import EngineArguments, amount, count
from turnmill_worker.engines.base import (
    Answer,
    Capacity,
    EngineAway,
    EngineDied,
    EngineError,
    EngineSettings,
    InvalidRequest,
    Progress,
    TurnError,
)
from turnmill_worker.engines.chunks import Chunks
from turnmill_worker.engines.loop_thread import LoopThread
from turnmill_worker.engines.openai_facts import Facts, ask_facts
from turnmill_worker.engines.openai_form import Form, answer_of
from turnmill_worker.engines.openai_http import Connection, Cut, Refused, parse_url
from turnmill_worker.engines.openai_room import ServersRoom
from turnmill_worker.engines.pace import Pace, pause
from turnmill_worker.engines.presence import Presence
from turnmill_worker.engines.too_long import too_long

log = logging.getLogger("turnmill.engines.openai")

_SLOTS = 64
_SAY_AGAIN = 60.0
"""Seconds between two lines in the log about a server that is not there yet."""
_LONGEST_START_PAUSE = 10.0
_HOLD = 300.0
"""Seconds before a server is asked again that wants another key, or money."""
_CLOSE_SECONDS = 5.0
_OURS = (401, 402, 403)
"""What is wrong with us, not with a turn."""
_PASSES = (408, 409, 425, 429)


def build(settings: EngineSettings) -> OpenAIEngine:
    """Waits for the server, for as long as it is not there. Raises UsageError for arguments that are wrong, a key that
    it refuses, and a model that it has not."""
    arguments = _parse(settings)
    url = parse_url(arguments.url or os.environ.get("OPENAI_BASE_URL") or _no_url())
    key = _key()

    async def connect() -> tuple[Connection, Facts]:
        connection = Connection(url, key, arguments.connect_timeout)
        try:
            return connection, await _until_there(connection, settings.model)
        except BaseException:
            await connection.aclose()
            raise

    thread = LoopThread("openai-engine-loop", lambda: EngineDied("the engine is closed"))
    thread.run(uvloop.new_event_loop())
    try:
        connection, facts = thread.submit(connect()).result()
    except BaseException:
        thread.stop()
        raise
    return OpenAIEngine(thread, connection, facts, settings, arguments)


def _parse(settings: EngineSettings) -> argparse.Namespace:
    parser = EngineArguments("openai")
    parser.add_argument("url", nargs="?", help="base URL, with its /v1; else OPENAI_BASE_URL")
    parser.add_argument(
        "--context", type=count, help="tokens of prompt and answer, where the server does not say"
    )
    parser.add_argument(
        "--retries", type=int, default=8, help="of a request that failed for a reason that passes"
    )
    parser.add_argument("--connect-timeout", type=amount, default=10.0, help="seconds")
    parser.add_argument(
        "--silence", type=amount, default=600.0, help="seconds between two tokens, or to the first"
    )
    parser.add_argument(
        "--answer-timeout", type=amount, default=3600.0, help="seconds, where nothing is streamed"
    )
    parser.add_argument(
        "--stream-tools", action="store_true", help="stream the answers to turns with tools, too"
    )
    return parser.parse_args(settings.arguments)


def _no_url() -> str:
    raise UsageError("engine openai: no base URL: give it after --, or in OPENAI_BASE_URL")


def _key() -> str | None:
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UsageError("engine openai: OPENAI_API_KEY has characters that no key has")
    return key or None


async def _until_there(connection: Connection, model: str | None) -> Facts:
    attempt, said = 0, -math.inf
    while True:
        try:
            return await ask_facts(connection, model)
        except Cut as cut:
            if time.monotonic() - said > _SAY_AGAIN:
                log.warning("waiting for %s: %s", connection.url, cut)
                said = time.monotonic()
        await asyncio.sleep(min(pause(attempt), _LONGEST_START_PAUSE))
        attempt += 1


class _Call:
    """A turn in the engine. `end` is why it ends early, if it does."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        self.end: EngineError | None = None


class OpenAIEngine:
    """One server. What is called from the worker's loop hands over to the engine's own, where all else runs."""

    def __init__(
        self,
        thread: LoopThread,
        connection: Connection,
        facts: Facts,
        settings: EngineSettings,
        arguments: argparse.Namespace,
    ) -> None:
        self._thread, self._connection, self._facts = thread, connection, facts
        self._arguments = arguments
        base = os.path.basename(facts.model.rstrip("/"))
        own_name = base if os.path.isabs(facts.model) else facts.model
        self._served_name = settings.served_name or own_name
        self._identity = EngineIdentity(
            engine="openai",
            version=facts.version,
            model=facts.model,
            revision=settings.revision,
            dtype=facts.dtype,
        )
        slots = settings.slots or facts.slots or _SLOTS
        self._capacity = Capacity(slots, arguments.context or facts.context)
        self._form = Form(facts.model, facts.counts, stream_tools=arguments.stream_tools)
        self._seats = asyncio.Semaphore(slots)
        self._pace = Pace()
        self._presence = Presence(
            connection.url,
            self._why_not_there,
            gone=lambda why: self._end_all(EngineAway(why, held=True)),
        )
        self._calls: dict[str, _Call] = {}
        self._futures: dict[str, Future[Answer]] = {}
        self._has_answered = self._closed = False
        if not self._capacity.context:
            log.warning("%s does not say how long its context is: --context can", connection.url)

    # From the worker's loop

    adapters = NO_ADAPTERS  # a server's are models to it, as they are to us

    @property
    def identity(self) -> EngineIdentity:
        return self._identity

    @property
    def served_name(self) -> str:
        return self._served_name

    def capacity(self) -> Capacity:
        return self._capacity

    async def answer(self, turn: Turn, rid: str, progress: Progress) -> Answer:
        future = self._futures[rid] = self._thread.submit(self._answer(turn, rid, progress))
        try:
            return await asyncio.wrap_future(future)
        finally:
            del self._futures[rid]

    async def abort(self, rid: str) -> None:
        if future := self._futures.get(rid):
            future.cancel()

    async def healthy(self) -> bool:
        return await asyncio.wrap_future(self._thread.submit(self._healthy()))

    def running(self) -> int:
        return len(self._calls)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(TimeoutError):
            self._thread.submit(self._hang_up()).result(_CLOSE_SECONDS)
        self._thread.stop()

    # On the engine's loop

    async def _hang_up(self) -> None:
        self._end_all(EngineDied("the engine is closed"))
        await self._connection.aclose()

    async def _healthy(self) -> bool:
        return await self._presence.healthy(busy=bool(self._calls))

    async def _why_not_there(self) -> str:
        """Asked of a server that was there. One that comes back as another is a new engine: EngineDied."""
        try:
            said = await self._connection.get(self._facts.health)
            if said.status >= 500:
                return f"{self._facts.health}: {said.status}: {said.words}"
            if not self._presence.away:
                return ""
            now = await ask_facts(self._connection, self._facts.model)
        except (Cut, UsageError) as error:
            return str(error)
        if replace(now, slots=None) != replace(self._facts, slots=None):
            raise EngineDied(f"the server is another one now: {now}")
        return ""

    def _end_all(self, end: EngineError) -> None:
        for call in list(self._calls.values()):
            call.end = end
            call.task.cancel()

    async def _answer(self, turn: Turn, rid: str, progress: Progress) -> Answer:
        task = asyncio.current_task()
        assert task is not None
        call = self._calls[rid] = _Call(task)
        try:
            if self._presence.away:
                raise EngineAway(self._presence.away)
            return await self._ask(turn, progress)
        except asyncio.CancelledError:
            if call.end:
                raise call.end from None
            raise
        finally:
            del self._calls[rid]

    async def _ask(self, turn: Turn, progress: Progress) -> Answer:
        """Ask until there is an answer, or a reason why there is none."""
        room = ServersRoom(turn, self._capacity.context)
        attempt = 0
        while True:
            await self._pace.wait()
            try:
                async with self._seats:
                    chunks = await self._receive(turn, room, progress)
                self._has_answered = True
                return answer_of(turn, chunks, room)
            except Refused as refusal:
                progress.sent = None
                self._presence.heard()
                if self._take_in(turn, refusal, room):
                    continue
                wait, trouble = refusal.wait, str(refusal)
                if refusal.status == 429 and wait:
                    self._pace.hold(wait)
                if refusal.status >= 500:
                    await self._check_presence(held=True)
            except Cut as cut:
                wait, trouble = None, str(cut)
                await self._check_presence(held=cut.sent)
                if cut.slow:
                    raise TurnError(f"nothing came of the server for too long: {cut}") from cut
            if attempt >= self._arguments.retries:
                raise TurnError(trouble)
            seconds = max(pause(attempt), wait or 0.0)
            log.info("asked again in %.1f s: %s", seconds, trouble)
            await asyncio.sleep(seconds)
            attempt += 1

    async def _receive(self, turn: Turn, room: ServersRoom, progress: Progress) -> Chunks:
        """One request. Raises Refused and Cut."""
        path, body = self._form.fill(turn, room)
        progress.tokens, progress.first_token, progress.last_token = 0, None, None
        progress.now_rendered(
            {
                "endpoint": f"{self._connection.url}/{path}",
                "prompt_digest": _digest(turn),
                "sampling": self._form.sampling_of(body),
            }
        )
        silence = self._arguments.silence if body["stream"] else self._arguments.answer_timeout
        chunks = Chunks()
        progress.now_sent()
        objects = self._connection.chunks(path, body, silence)
        async with contextlib.aclosing(objects):
            async for chunk in objects:
                self._presence.heard()
                chunks.add(chunk)
                made = (chunk.get("usage") or {}).get("completion_tokens")
                progress.moved(chunks.pieces if made is None else made)
        if chunks.finish is None:
            raise Cut("the answer ended early", sent=True)
        progress.request["prompt_tokens"] = chunks.usage.get("prompt_tokens")
        progress.tokens = chunks.usage.get("completion_tokens", progress.tokens)
        return chunks

    def _take_in(self, turn: Turn, refusal: Refused, room: ServersRoom) -> bool:
        """What follows from a refusal: True, ask again at once, in another way; False, again later. Raises NoRoom,
        InvalidRequest, EngineAway."""
        status, words = refusal.status, refusal.words
        if status in (400, 413, 422) and (said := too_long(refusal.error, words)):
            room.shrink(said, words)
            return True
        if status in (400, 422) and self._form.adapt(turn, words):
            return True
        if status in _OURS and not (status == 403 and self._has_answered):
            self._presence.leave(str(refusal), _HOLD)
        if refusal.error.get("code") == "insufficient_quota":
            self._presence.leave(str(refusal), _HOLD)
        if self._presence.away:
            raise EngineAway(self._presence.away)
        if status in _PASSES or status >= 500:
            return False
        raise InvalidRequest(words if status in (400, 422) else str(refusal))

    async def _check_presence(self, *, held: bool) -> None:
        try:
            await self._presence.confirm()
        except EngineAway as away:
            raise EngineAway(str(away), held=held) from None


def _digest(turn: Turn) -> str:
    """SHA-256 over the prompt, or over the JSON of all that its server will make it of."""
    if turn.prompt is not None:
        return hashlib.sha256(turn.prompt.encode()).hexdigest()
    parts = turn.model_dump(
        exclude_none=True, include={"messages", "tools", "chat_template_kwargs"}
    )
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
