"""A load of requests against gateways, in front of workers with the scripted engine: asked when they are due, and every
answer compared with what it has to be."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any

import aiohttp
from pydantic_core import from_json

from benchmarks.trace import Arrival
from benchmarks.turns import MODEL
from turnmill.turn import Message
from turnmill_worker.engines.sim import history_hash

STREAMS, HANGS_UP = 0.5, 0.1
"""Shares: of the requests, and of those that stream."""
GREEDY = 0.25
PADDING = ("grain", "husk", "stone", "wheel", "flour", "sack", "water", "miller")
"""With which the scripted engine fills up its answers."""
ANSWER = ("--answer", "history-hash")
"""What the workers must be told."""
GONE_SECONDS = 300.0


@dataclass(frozen=True)
class Request:
    """`at`: seconds after the load has begun, at its own pace. `path`: up to and with `/v1`. `tokens`: of the answer.
    `hangs_up`: after the first text of a stream."""

    at: float
    path: str
    content: str
    tokens: int
    stream: bool = False
    hangs_up: bool = False
    greedy: bool = False

    @property
    def body(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": self.content}],
            "max_tokens": self.tokens,
            "ignore_eos": True,
        }
        if self.greedy:
            told["temperature"] = 0
        if self.stream:
            told |= {"stream": True, "stream_options": {"include_usage": True}}
        return told

    @property
    def answer(self) -> str:
        digest = history_hash([Message(role="user", content=self.content)])
        return " ".join([digest, *islice(cycle(PADDING), self.tokens - 1)])

    @property
    def outside(self) -> bool:
        """Of no run."""
        return self.path == "/v1"


@dataclass
class Outcome:
    """How a request went, in seconds. `late`: from when it was due until it was asked. `first`: from there to the
    first text of a stream; `took`: to the end. `hung_up`: before the end, as it was to. `problem`: why it is not the one
    right answer, if it is not."""

    request: Request
    late: float = 0.0
    first: float | None = None
    took: float = 0.0
    hung_up: bool = False
    problem: str = ""


@dataclass
class _Heard:
    """The parts of a response."""

    texts: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def problem(self, request: Request) -> str:
        if "".join(self.texts) != request.answer:
            return f"{len(''.join(self.texts))} characters of {len(request.answer)}, or other ones"
        if (self.reasons, self.tokens) != (["length"], [request.tokens]):
            return f"finish_reason {self.reasons}, completion_tokens {self.tokens}"
        return ""


def requests(
    trace: Sequence[Arrival], seed: int, name: str, *, abandoned: int = 1
) -> list[Request]:
    """A request for each arrival, all of them different: outside a run, in the run `name`, and in an attempt at it.
    Loads of different names have nothing in common. `abandoned`: who hangs up outside a run has asked for at least so
    many tokens."""
    chance = random.Random(seed)
    paths = cycle(("/v1", f"/runs/{name}/v1", f"/runs/{name}/attempts/1/v1"))
    found = []
    for number, arrival in enumerate(trace):
        words = [name, str(number), *islice(cycle(PADDING), max(0, arrival.prompt - 2))]
        stream = chance.random() < STREAMS
        hangs_up = stream and chance.random() < HANGS_UP
        greedy = chance.random() < GREEDY
        one = Request(
            arrival.at, next(paths), " ".join(words), arrival.answer, stream, hangs_up, greedy
        )
        if one.hangs_up and one.outside:
            one = replace(one, tokens=max(one.tokens, abandoned))
        found.append(one)
    return found


async def play(urls: Sequence[str], load: Sequence[Request], speed: float) -> list[Outcome]:
    """Ask all requests, so many times as fast as they came, each of the next gateway; returns when the last has
    ended. No connection stays open."""
    start = asyncio.get_running_loop().time()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=GONE_SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        where = cycle(urls)
        asks = [_ask(session, next(where), one, start + one.at / speed) for one in load]
        return await asyncio.gather(*asks)


async def _ask(session: aiohttp.ClientSession, url: str, request: Request, due: float) -> Outcome:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(due - loop.time())
    asked = loop.time()
    outcome = Outcome(request, late=asked - due)
    heard = _Heard()
    where = f"{url}{request.path}/chat/completions"
    try:
        async with session.post(where, json=request.body) as response:
            if response.status != 200:
                outcome.problem = f"status {response.status}: {await response.text()}"
            elif request.stream:
                async for _ in _texts(response, heard):
                    outcome.first = outcome.first or loop.time() - asked
                    if request.hangs_up:
                        outcome.hung_up = True
                        response.close()
                        return outcome
            else:
                _note(from_json(await response.read()), "message", heard)
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
        outcome.problem = f"{type(error).__name__}: {error}"
    outcome.took = loop.time() - asked
    outcome.problem = outcome.problem or heard.problem(request)
    return outcome


async def _texts(response: aiohttp.ClientResponse, heard: _Heard) -> AsyncIterator[None]:
    """The events of a stream; comes back after each that has text. Raises ValueError for one that does not end well."""
    done = False
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        if done:
            raise ValueError("the stream went on after its end")
        if line == b"data: [DONE]\n":
            done = True
            continue
        event = from_json(line.removeprefix(b"data: "))
        if "error" in event:
            raise ValueError(event["error"]["message"])
        before = len(heard.texts)
        _note(event, "delta", heard)
        if len(heard.texts) > before:
            yield
    if not done:
        raise ValueError("the stream ended in the middle")


def _note(event: dict[str, Any], part: str, heard: _Heard) -> None:
    for choice in event["choices"]:
        if text := choice[part].get("content"):
            heard.texts.append(text)
        if choice["finish_reason"]:
            heard.reasons.append(choice["finish_reason"])
    if event.get("usage"):
        heard.tokens.append(event["usage"]["completion_tokens"])
