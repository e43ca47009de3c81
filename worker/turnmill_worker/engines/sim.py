"""A scripted engine, which makes tests and benchmarks exact: latency, speed, context, faults.

A token is a word with the white space before it. The prompt is a line `role: text` for each message, or the turn's own.
Nothing is cached between turns (`cached_tokens` is 0), tools and `response_format` are read as
part of the turn but never used (but by a play, which may call tools), and sampling changes nothing but the answer's length. What a turn is
answered is a function of its messages or its prompt alone, so a test can say beforehand what must come back; but for
`chain`, whose first token is random: there a test can see whether an answer is of one piece. An adapter puts its name before all
answers but a play's.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import re
import secrets
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from importlib.metadata import version
from itertools import accumulate, cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from turnmill.reply import EngineIdentity, Usage
from turnmill.turn import Message, Turn
from turnmill_worker.engines.adapters import adapter_of
from turnmill_worker.engines.arguments import EngineArguments, amount, count
from turnmill_worker.engines.base import (
    Answer,
    Capacity,
    EngineDied,
    EngineSettings,
    InvalidRequest,
    Progress,
    TurnError,
)
from turnmill_worker.engines.kept import Part, can_be_told, can_go_on, joined, settled
from turnmill_worker.engines.room import Room, room
from turnmill_worker.engines.sim_play import Play

_TOKEN = re.compile(r"\s*\S+|\s+\Z")
_PADDING = (" grain", " husk", " stone", " wheel", " flour", " sack", " water", " miller")
_MESSAGES = TypeAdapter(list[Message])
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
_RESPONSE_FORMATS = ("text", "json_object", "json_schema")
_FAULTS = {
    "kill": "the process kills itself with SIGKILL",
    "die": "the engine dies, with all turns in it",
    "reject": "the turn is refused as invalid",
    "fail": "the turn fails",
    "hang": "the turn never moves",
    "freeze": "the engine never moves again, and answers no health check",
    "block": "the worker's event loop stands still for 5 s",
}
_BLOCK_SECONDS = 5.0
_STEP = 0.25
"""Seconds. How finely a slow answer is seen to grow; finer would cost more with thousands of turns."""
_TOLD_STEP = 0.05
"""The same, where somebody reads along."""


def history_hash(question: Sequence[Message] | str) -> str:
    """16 hex digits that change with every change of the prompt, or of the messages, their order and number."""
    if isinstance(question, str):
        text = _canonical(question)
    else:
        text = _canonical(_MESSAGES.dump_python(list(question), exclude_none=True))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def build(settings: EngineSettings) -> SimEngine:
    """A scripted engine. Raises UsageError for arguments that are not its own."""
    return SimEngine(settings, _parse(settings))


def _parse(settings: EngineSettings) -> argparse.Namespace:
    parser = EngineArguments("sim")
    parser.add_argument(
        "--latency",
        type=amount,
        default=0,
        help="seconds from the start of a turn to its first token",
    )
    parser.add_argument(
        "--tokens-per-second",
        type=amount,
        default=0,
        help="of one turn, after the first; 0: at once",
    )
    parser.add_argument(
        "--context", type=count, default=8192, help="tokens of prompt and answer, together"
    )
    parser.add_argument("--slots", type=count, help="turns at once; others wait (default: 64)")
    parser.add_argument(
        "--answer",
        choices=("echo", "history-hash", "words", "chain"),
        default="echo",
        help="the last user message's text or the prompt, a digest of all messages, --answer-tokens words, or so many of which "
        "the first is random and each other follows from the one before it",
    )
    parser.add_argument(
        "--answer-tokens",
        type=count,
        default=1,
        help="shorter answers are padded to so many tokens",
    )
    parser.add_argument(
        "--play",
        type=Path,
        metavar="FILE",
        help="answers and tool calls from a file, in place of --answer",
    )
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME",
        help="turns may ask for SERVED_NAME:NAME, too; again for another",
    )
    for fault, effect in _FAULTS.items():
        parser.add_argument(f"--{fault}-if", metavar="TEXT", help=f"a message has TEXT: {effect}")
    return parser.parse_args(settings.arguments)


class _Plan(NamedTuple):
    """A turn's whole answer, made before its time has passed."""

    text: str
    tokens: list[str]
    stopped: bool
    calls: Sequence[dict[str, Any]] = ()


class _Seat:
    """A turn inside the engine, and what it waits for: its slot, its next token, or for ever."""

    __slots__ = ("_end", "_waiting", "frozen", "has_slot")

    def __init__(self) -> None:
        self.has_slot = self.frozen = False
        self._waiting: asyncio.Future[None] | None = None
        self._end: BaseException | None = None

    async def wait(self, until: float | None = None) -> None:
        """Waits for a time of the loop (None: for `wake`). Raises what `end` was given."""
        if self._end:
            raise self._end
        loop = asyncio.get_running_loop()
        self._waiting = loop.create_future()
        timer = loop.call_at(until, self.wake) if until is not None else None
        try:
            await self._waiting
        finally:
            if timer:
                timer.cancel()

    def still_waits(self) -> bool:
        return self._waiting is not None and not self._waiting.done()

    def wake(self) -> None:
        if self._waiting and not self._waiting.done() and not self.frozen:
            self._waiting.set_result(None)

    def end(self, error: BaseException) -> None:
        """Ends the turn, now or at its next wait."""
        self._end = error
        if self._waiting and not self._waiting.done():
            self._waiting.set_exception(error)


class SimEngine:
    """The scripted engine. All its calls come from one thread, one event loop at a time."""

    def __init__(self, settings: EngineSettings, script: argparse.Namespace) -> None:
        self._script = script
        self._play = Play(script.play) if script.play else None
        self._at_once = not script.latency and not script.tokens_per_second
        self._served_name = settings.served_name or settings.model or "sim"
        self._identity = EngineIdentity(
            engine="sim",
            version=version("turnmill"),
            model=settings.model or "sim",
            revision=settings.revision,
            dtype="words",
        )
        self.adapters = {name: f"sim/{name}" for name in script.adapter}
        self._capacity = Capacity(script.slots or settings.slots or 64, script.context)
        self._seats: dict[str, _Seat] = {}
        self._queue: deque[_Seat] = deque()
        self._free = self._capacity.slots
        self._faults = [
            (fault, needle) for fault in _FAULTS if (needle := getattr(script, f"{fault}_if"))
        ]
        self._death: str | None = None
        self._frozen = False

    @property
    def identity(self) -> EngineIdentity:
        return self._identity

    @property
    def served_name(self) -> str:
        return self._served_name

    def capacity(self) -> Capacity:
        return self._capacity

    async def answer(self, turn: Turn, rid: str, progress: Progress) -> Answer:
        self._check_alive()
        prompt_tokens, space = _render(turn, self._script.context, progress)
        hangs = self._meets_a_fault(turn) or self._frozen
        played = self._play.answer(turn, _text) if self._play else None
        goes_on = can_go_on(turn) and not (played or {}).get("tool_calls")
        kept = _taken_over(turn, progress) if goes_on and progress.kept else []
        plan = self._plan(turn, space.max_tokens, kept, played)
        if goes_on:
            progress.growing = partial(_part, plan.tokens, progress)
        if can_be_told(turn):
            progress.telling = _Told(plan.tokens, turn.sampling.stop or (), progress).since
        progress.now_sent()
        if self._at_once and self._free and not hangs:
            progress.moved(len(plan.tokens))
            return _answer(turn, plan, prompt_tokens, space)
        seat = self._seats[rid] = _Seat()
        try:
            await self._take_slot(seat)
            await self._pass_time(seat, progress, len(plan.tokens), hangs)
        finally:
            del self._seats[rid]
            if seat.has_slot:
                self._pass_slot_on()
        return _answer(turn, plan, prompt_tokens, space)

    async def abort(self, rid: str) -> None:
        if seat := self._seats.get(rid):
            seat.end(asyncio.CancelledError())

    async def healthy(self) -> bool:
        self._check_alive()
        if self._frozen:
            await _Seat().wait()
        return True

    def running(self) -> int:
        return len(self._seats)

    def close(self) -> None:
        if not self._death:
            self._die("the engine is closed")

    def _check_alive(self) -> None:
        if self._death:
            raise EngineDied(self._death)

    def _die(self, why: str) -> None:
        self._death = why
        for seat in self._seats.values():
            seat.end(EngineDied(why))

    def _freeze(self) -> None:
        self._frozen = True
        for seat in self._seats.values():
            seat.frozen = True

    def _meets_a_fault(self, turn: Turn) -> bool:
        """Does what a fault in the turn asks for. True: the turn is to hang."""
        for effect, needle in self._faults:
            if not any(needle in text for text in _texts(turn)):
                continue
            if effect == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif effect == "die":
                self._die("the engine was told to die")
                self._check_alive()
            elif effect == "reject":
                raise InvalidRequest("the engine was told to refuse this turn")
            elif effect == "fail":
                raise TurnError("the engine was told to fail on this turn")
            elif effect == "block":
                time.sleep(_BLOCK_SECONDS)
            elif effect == "freeze":
                self._freeze()
            else:
                return True
        return False

    def _plan(
        self, turn: Turn, max_tokens: int, kept: list[str], played: dict[str, Any] | None
    ) -> _Plan:
        sampling = turn.sampling
        calls: Sequence[dict[str, Any]] = ()
        if played is not None:
            tokens, calls = _TOKEN.findall(played["content"] or ""), played.get("tool_calls", ())
        elif self._script.answer == "echo":
            tokens = _TOKEN.findall(_last_user_text(turn))
        elif self._script.answer == "history-hash":
            tokens = [history_hash(turn.question)]
        elif self._script.answer == "words":
            tokens = [_PADDING[0].lstrip()]
        else:
            tokens = [secrets.token_hex(4)]
        adapter = adapter_of(turn, self)
        if adapter is not None and played is None:
            tokens = _TOKEN.findall(f"{adapter}: {''.join(tokens)}")
        chained = self._script.answer == "chain" and played is None
        if chained:
            tokens[: len(kept)] = kept
        shortest = self._script.answer_tokens if played is None else 0
        wanted = max(shortest, sampling.min_tokens or 0)
        if sampling.ignore_eos:
            wanted = max_tokens
        if len(tokens) < wanted:
            more = _chain(tokens[-1]) if chained else cycle(_PADDING)
            tokens.extend(islice(more, wanted - len(tokens)))
        tokens[: len(kept)] = kept
        whole = len(tokens) <= max_tokens
        del tokens[max_tokens:]
        text = "".join(tokens)
        found = [(text.find(stop), stop) for stop in sampling.stop or () if stop in text]
        if not found:
            # A call is one token, whatever its length.
            tokens.extend(call["function"]["name"] for call in calls)
            return _Plan(text, tokens, whole and not sampling.ignore_eos, calls)
        start, stop = min(found)
        return _Plan(text[:start], _TOKEN.findall(text[: start + len(stop)]), stopped=True)

    async def _take_slot(self, seat: _Seat) -> None:
        if self._free:
            self._free -= 1
            seat.has_slot = True
        else:
            self._queue.append(seat)
            await seat.wait()

    def _pass_slot_on(self) -> None:
        """Gives a slot to the first that waits for one and is still there."""
        self._free += 1
        while self._free and self._queue:
            seat = self._queue.popleft()
            if seat.still_waits():
                self._free -= 1
                seat.has_slot = True
                seat.wake()

    async def _pass_time(self, seat: _Seat, progress: Progress, total: int, hangs: bool) -> None:
        if hangs:
            await seat.wait()
        latency, speed = self._script.latency, self._script.tokens_per_second
        loop = asyncio.get_running_loop()
        first = loop.time() + latency
        await seat.wait(first)
        before = progress.resumed_at
        made = min(total, before + 1) if speed else total
        progress.moved(made)
        while made < total:
            step = _TOLD_STEP if progress.streamed else _STEP
            made = min(total, made + max(1, round(speed * step)))
            await seat.wait(first + (made - before - 1) / speed)
            progress.moved(made)


def follows(token: str) -> str:
    """The token of a chain after this one."""
    return hashlib.sha256(token.encode()).hexdigest()[:8]


def _chain(token: str) -> Iterator[str]:
    while True:
        token = follows(token.strip())
        yield f" {token}"


def _taken_over(turn: Turn, progress: Progress) -> list[str]:
    """The tokens of an earlier try from which this one goes on."""
    tokens: list[str] = joined(progress.kept, json.loads)
    count = settled(len(tokens), lambda n: "".join(tokens[:n]), turn.sampling.stop or ())
    progress.resumed_at = count
    return tokens[:count]


class _Told:
    """What readers may be told of an answer."""

    def __init__(self, tokens: list[str], stops: Sequence[str], progress: Progress) -> None:
        self._tokens, self._stops, self._progress = tokens, stops, progress
        self._looked_at = max(map(len, stops), default=0) + 1  # characters

    def since(self, characters: int) -> str:
        there_are = max(self._progress.tokens, self._progress.resumed_at)
        count = settled(there_are, self._end, self._stops)
        return self._text[characters : self._ends[count]]

    def _end(self, count: int) -> str:
        end = self._ends[count]
        return self._text[max(0, end - self._looked_at) : end]

    @cached_property
    def _text(self) -> str:
        return "".join(self._tokens)

    @cached_property
    def _ends(self) -> list[int]:
        """Where in the text its first tokens end: none of them, one, two..."""
        return [0, *accumulate(map(len, self._tokens))]


def _part(tokens: list[str], progress: Progress, offset: int) -> Part:
    new = tokens[offset : progress.tokens]
    return Part(offset, len(new), json.dumps(new).encode())


def _render(turn: Turn, context: int, progress: Progress) -> tuple[int, Room]:
    """The prompt's tokens and the room that it leaves. Raises InvalidRequest, NoRoom."""
    wanted = turn.response_format
    if wanted is not None and wanted.get("type") not in _RESPONSE_FORMATS:
        raise InvalidRequest(f"response_format: type must be one of {', '.join(_RESPONSE_FORMATS)}")
    lines = [f"{message.role}: {_text(message)}" for message in turn.messages]
    lines += [turn.prompt] if turn.prompt is not None else []
    lines += [tool.model_dump_json(exclude_none=True) for tool in turn.tools or ()]
    prompt = "\n".join(lines)
    prompt_tokens = len(prompt.split())
    space = room(prompt_tokens, turn.sampling.max_tokens, context=context)
    sampling = turn.sampling.model_dump(exclude_none=True)
    progress.now_rendered(
        {
            "endpoint": "sim.answer",
            "prompt_tokens": prompt_tokens,
            "prompt_digest": hashlib.sha256(prompt.encode()).hexdigest(),
            "sampling": sampling | {"max_tokens": space.max_tokens},
        }
    )
    return prompt_tokens, space


def _text(message: Message) -> str:
    """What a message says: its text parts, reasoning and tool calls, on one line each."""
    content = message.content
    if isinstance(content, str) and not message.tool_calls and not message.reasoning_content:
        return content
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content)
    calls = [json.dumps(call, sort_keys=True) for call in message.tool_calls or ()]
    return "\n".join(part for part in (message.reasoning_content, content, *calls) if part)


def _texts(turn: Turn) -> list[str]:
    return [_text(message) for message in turn.messages] if turn.prompt is None else [turn.prompt]


def _last_user_text(turn: Turn) -> str:
    for message in reversed(turn.messages):
        if message.role == "user":
            return _text(message)
    return _texts(turn)[-1]


def _answer(turn: Turn, plan: _Plan, prompt_tokens: int, space: Room) -> Answer:
    usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=len(plan.tokens))
    message: dict[str, Any] = {"role": "assistant", "content": plan.text}
    logprobs = (
        _logprobs(plan.tokens, turn.sampling.top_logprobs or 0) if turn.sampling.logprobs else None
    )
    if plan.stopped and plan.calls:
        message |= {"content": plan.text or None, "tool_calls": list(plan.calls)}
        return Answer(message, "tool_calls", usage, logprobs=logprobs)
    if plan.stopped:
        return Answer(message, "stop", usage, logprobs=logprobs)
    return Answer(message, "length", usage, space.limited_by, space.limit, logprobs)


def _logprobs(tokens: Sequence[str], top: int) -> dict[str, Any]:
    """OpenAI's `choices[0].logprobs`: each token is certain, all others are as good as impossible."""

    def entry(token: str, logprob: float) -> dict[str, Any]:
        return {"token": token, "logprob": logprob, "bytes": list(token.encode())}

    others = [entry(word, -100.0) for word in _PADDING]
    content = []
    for token in tokens:
        chosen = entry(token, 0.0)
        rivals = [other for other in others if other["token"] != token]
        content.append({**chosen, "top_logprobs": [chosen, *rivals][:top]})
    return {"content": content}
