"""The engine seam: what a worker needs of an engine, and nothing more.

An adapter takes messages and gives back an assistant message. Turning messages into a prompt, and
text into reasoning, tool calls and logprobs, is the engine's own chat layer wherever that can be
called, so that a turn is answered as the engine's HTTP server would answer it. How a turn *ends*
(completed, capped, failed) is not decided here: an adapter reports facts, job.py decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from turnmill.reply import Cap, EngineIdentity, Reply, Usage
from turnmill.turn import Turn
from turnmill_worker.engines.kept import Part


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is built from.

    `model` is a path or an id; `served_name` the name that turns ask for; `slots` the wanted number
    of turns at once (None: what the engine says it can hold); `arguments` everything after `--` on the
    command line, for the engine's own parser.
    """

    model: str | None = None
    served_name: str | None = None
    revision: str | None = None
    slots: int | None = None
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Capacity:
    """What an engine can hold, all data-parallel ranks counted.

    `slots`: turns running at once. `context`: tokens of prompt and answer of one turn, together (0: not known).
    `kv_tokens`: tokens of all running turns together (None: not known).
    """

    slots: int
    context: int
    kv_tokens: int | None = None


@dataclass
class Progress:
    """Written by an adapter while it answers one turn, read by the worker (times in Unix seconds).

    `tokens`: of the answer so far, in all. `kept`: what an earlier try has kept of it; an adapter that goes on
    from there says so by `resumed_at`, the number of tokens that it took over. `growing` is set by an adapter whose
    unfinished answers can be kept: called from the worker's loop with an offset, it gives the tokens from there on.
    `telling` is set by an adapter, before it says `now_sent`, where readers may be told of the answer while it grows: called
    from the worker's loop with a number of characters, it gives the text from there on, up to the last token from which
    the answer could go on elsewhere (kept.py). Nothing that it gave is ever taken back.
    `priority`: of the turn among those in the engine, 0 to 9, larger first; for engines that have an order of their own.
    `streamed`: somebody reads along. `heard`: called when there are more tokens, in the thread that made them.
    `reply`: what the job made of the answer.
    """

    rendered: float | None = None
    sent: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    tokens: int = 0
    request: dict[str, Any] = field(default_factory=dict)
    kept: Sequence[Part] = ()
    resumed_at: int = 0
    growing: Callable[[int], Part] | None = None
    telling: Callable[[int], str] | None = None
    priority: int = 5
    streamed: bool = False
    heard: Callable[[], None] | None = None
    reply: Reply | None = None

    @property
    def made(self) -> int:
        """Tokens that this try has made."""
        return max(0, self.tokens - self.resumed_at)

    def now_rendered(self, request: dict[str, Any]) -> None:
        """The prompt is made. `request`: `{endpoint, prompt_tokens, prompt_digest, sampling}`."""
        self.rendered, self.request = time.time(), request

    def now_sent(self) -> None:
        self.sent = time.time()

    def moved(self, tokens: int) -> None:
        """The answer has `tokens` tokens in all by now."""
        now = time.time()
        if self.first_token is None and tokens:
            self.first_token = now
        if tokens > self.tokens:
            self.tokens, self.last_token = tokens, now
            if self.heard is not None:
                self.heard()

    def times(self, enqueued: float, claimed: float) -> dict[str, float]:
        """The fields of the trace's times."""
        times = {
            "enqueued": enqueued,
            "claimed": claimed,
            "rendered": self.rendered,
            "sent": self.sent,
            "first_token": self.first_token,
            "last_token": self.last_token,
            "finished": time.time(),
        }
        return {name: at for name, at in times.items() if at is not None}


class Answer(NamedTuple):
    """What an engine made of a turn: facts, no verdict.

    `message` is an OpenAI assistant message (`role`, `content`, and where there are any
    `reasoning_content`, `tool_calls`). `finish` is the engine's word: `stop`, `tool_calls`, `length`. With
    `length`, `limited_by` says which limit it was and `limit` how many tokens that is. `logprobs` has the
    shape of OpenAI's `choices[0].logprobs`.
    """

    message: dict[str, Any]
    finish: Literal["stop", "tool_calls", "length"]
    usage: Usage
    limited_by: Cap | None = None
    limit: int | None = None
    logprobs: dict[str, Any] | None = None


class EngineError(Exception):
    """Base of what an adapter may raise from `answer` (`EngineDied` from anywhere, `EngineAway` from `healthy` too)."""


class NoRoom(EngineError):
    """The prompt leaves no room for one token of answer; the engine was not called.

    Attributes: prompt_tokens, limit (the most tokens of prompt and answer together, as met).
    """

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        self.prompt_tokens, self.limit = prompt_tokens, limit
        super().__init__(f"prompt of {prompt_tokens} tokens leaves no room in {limit}")


class InvalidRequest(EngineError):
    """The turn itself is wrong, for this engine: the text is the engine's or the template's own."""


class TurnError(EngineError):
    """The engine failed on this turn alone; others go on."""


class EngineDied(EngineError):
    """The engine is gone; every turn in it must be taken up elsewhere."""


class EngineAway(EngineError):
    """The engine cannot be reached for now, and may be again: turns go back, and none are claimed until `healthy`
    says True. `held`: the turn was in the engine when it went."""

    def __init__(self, why: str, *, held: bool = False) -> None:
        self.held = held
        super().__init__(why)


class Answering(Protocol):
    """What answers the turns that ask for one name."""

    @property
    def identity(self) -> EngineIdentity: ...

    @property
    def served_name(self) -> str:
        """The model name that turns ask for."""
        ...

    async def answer(self, turn: Turn, rid: str, progress: Progress) -> Answer:
        """Answer one turn. `rid` is unique and of fixed length. Cancelling this call aborts the
        request in the engine. Where `progress.kept` has tokens, an adapter may go on from them: what
        it returns is then the whole answer all the same. Raises EngineError's children only."""
        ...


class Engine(Answering, Protocol):
    """One engine, built before the worker's event loop exists and outside any running loop.

    `answer`, `abort` and `healthy` are called from the worker's loop and must not block it.
    """

    @property
    def adapters(self) -> Mapping[str, str]:
        """The LoRA adapters that it has loaded: by name, where its weights came from. It answers turns that ask for
        `SERVED_NAME:NAME`, too (adapters.py)."""
        ...

    def capacity(self) -> Capacity: ...

    async def abort(self, rid: str) -> None:
        """End a request early; unknown rids are ignored. Its `answer` call raises CancelledError
        or returns what there is."""
        ...

    async def healthy(self) -> bool:
        """Whether the engine would answer. Raises EngineDied when it is gone for good, EngineAway while it
        cannot be reached."""
        ...

    def running(self) -> int:
        """How many requests are inside the engine now."""
        ...

    def close(self) -> None:
        """End the engine, its threads and its children. May be called twice."""
        ...


class EngineFactory(Protocol):
    """What each engine module exposes as `build`. Raises turnmill's UsageError for bad settings."""

    def __call__(self, settings: EngineSettings) -> Engine: ...
