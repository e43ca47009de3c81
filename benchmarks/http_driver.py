"""An OpenAI client that costs little: it counts, and parses next to nothing."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import uvloop
from pydantic_core import from_json

_TEXT = re.compile(rb'"content": ?"[^"]')
_MADE = re.compile(rb'"completion_tokens": ?(\d+)')
_LOOKED_AT = 4096
"""Bytes: the last of a stream, in which the counts are; the first text may be cut by as much as a read ends with."""


@dataclass(frozen=True)
class Asked:
    """Tokens made by all requests, the seconds that they took together, and the seconds that each waited for the first
    text of its answer (of a whole answer: for all of it)."""

    tokens: int
    seconds: float
    first: list[float]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def ask(url: str, bodies: Sequence[dict[str, Any]], connections: int) -> Asked:
    """POST all bodies, so many at a time. Raises RuntimeError for a response that is no answer."""
    return uvloop.run(_ask(url, bodies, connections))


async def _ask(url: str, bodies: Sequence[dict[str, Any]], connections: int) -> Asked:
    left = iter(bodies)
    tokens, first = 0, []

    async def connection(session: aiohttp.ClientSession) -> None:
        nonlocal tokens
        for body in left:
            made, waited = await _one(session, url, body)
            tokens += made
            first.append(waited)

    connector = aiohttp.TCPConnector(limit=connections)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        started = time.perf_counter()
        await asyncio.gather(*(connection(session) for _ in range(connections)))
        return Asked(tokens, time.perf_counter() - started, first)


async def _one(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, float]:
    started = time.perf_counter()
    waited: float | None = None
    read = b""
    async with session.post(url, json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{url}: {response.status} {await response.text()}")
        if not body.get("stream"):
            made = from_json(await response.read())["usage"]["completion_tokens"]
            return made, time.perf_counter() - started
        async for part in response.content.iter_any():
            read = read[-_LOOKED_AT:] + part
            if waited is None and _TEXT.search(read):
                waited = time.perf_counter() - started
    counts = _MADE.findall(read)
    if waited is None or not counts or not read.rstrip().endswith(b"data: [DONE]"):
        raise RuntimeError(f"{url}: a stream ended with {read[-1000:]!r}")
    return int(counts[-1]), waited
