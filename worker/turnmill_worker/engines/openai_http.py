"""Talking to an OpenAI-compatible server: one request, its response or the events of its stream, and what it says is
wrong. Nothing is tried again here, and nothing judged.

With aiohttp, because its parser is C: a token of a stream costs a fifth of what it costs with httpx, which would fill a
core at some 7,000 tokens a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from turnmill.errors import UsageError
from turnmill_worker.engines.pace import retry_after

_QUESTION_SECONDS = 30.0
"""For whatever is no answer. SGLang's health check may take 20 s: it waits for a token."""
_WRITE_SECONDS = 60.0
_IDLE_SECONDS = 2.0
"""How long a connection is kept for the next request. Servers keep it for 5 s, and a request that meets the end of that
is lost."""
_DRAIN_SECONDS = 1.0
_WORDS_LENGTH = 2000
"""Characters of a refusal that are kept: a proxy's may be a whole page."""
_FAULTS = (aiohttp.ClientError, TimeoutError, OSError)


class Refused(Exception):
    """The server has answered with an error, by status or within a stream.

    `status`: HTTP's, or the like. `error`: its error object. `wait`: the seconds that it asks to wait.
    """

    def __init__(
        self, status: int, words: str, error: dict[str, Any], wait: float | None = None
    ) -> None:
        self.status, self.words, self.error, self.wait = status, words, error, wait
        super().__init__(f"{status}: {words}")


class Cut(Exception):
    """There was no whole response. `sent`: the server may have begun on the request. `slow`: it was given up
    because nothing came."""

    def __init__(self, words: str, *, sent: bool, slow: bool = False) -> None:
        self.sent, self.slow = sent, slow
        super().__init__(words)


class Said(NamedTuple):
    """A response to a question. `data`: its JSON, None if it is none."""

    status: int
    words: str
    data: Any


class Connection:
    """A server at a base URL. Made in the event loop in which it is used. `connect`: seconds that connecting may take.
    Whoever asks sees to it that not too many ask at once."""

    def __init__(self, url: str, key: str | None, connect: float) -> None:
        self.url = url
        self._key = key
        self._connect = connect
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),  # one would tie all turns to one server behind a balancer
        )
        self._proxy = _proxy_for(url)

    def root(self, path: str) -> str:
        """The URL of a path that servers have beside `/v1`."""
        parts = urlsplit(self.url)
        base = parts.path.removesuffix("/v1")
        return urlunsplit((parts.scheme, parts.netloc, base + path, "", ""))

    async def get(self, url: str) -> Said:
        """Raises Cut."""
        timeout = self._timeout(_QUESTION_SECONDS)
        try:
            async with self._session.get(
                url, timeout=timeout, proxy=self._proxy, allow_redirects=False
            ) as response:
                text = await response.text(errors="replace")
        except _FAULTS as error:
            raise _cut(error) from error
        data = _json(text)
        words, _ = self._complaint(data, text)
        return Said(response.status, words, data)

    async def chunks(
        self, path: str, body: dict[str, Any], silence: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The objects of a stream; of a response that is no stream, the one that it is. Ends early if the stream
        does. `silence`: seconds for which nothing may come. Raises Refused and Cut."""
        asking = self._session.post(
            f"{self.url}/{path}",
            data=json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(),
            headers={"Content-Type": "application/json"},
            timeout=self._timeout(silence),
            proxy=self._proxy,
            allow_redirects=False,
        )
        try:
            async with asking as response:
                if response.status != 200:
                    raise await self._refusal(response)
                if response.content_type != "text/event-stream":
                    yield self._read(await response.read())
                    return
                events = _events(response.content.iter_any())
                async for event in events:
                    if event == b"[DONE]":
                        break
                    yield self._read(event)
                await _drain(events)
        except _FAULTS as error:
            raise _cut(error) from error

    async def aclose(self) -> None:
        await self._session.close()

    def _timeout(self, silence: float) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(sock_connect=self._connect, sock_read=silence)

    async def _refusal(self, response: aiohttp.ClientResponse) -> Refused:
        text = await response.text(errors="replace")
        words, error = self._complaint(_json(text), text)
        wait = retry_after(response.headers)
        return Refused(response.status, words or response.reason or "", error, wait)

    def _read(self, text: bytes) -> dict[str, Any]:
        try:
            data = json.loads(text)
        except ValueError:
            raise Cut(f"it is not JSON: {text[:100]!r}", sent=True) from None
        if not isinstance(data, dict):
            raise Cut(f"it is not an object: {text[:100]!r}", sent=True)
        if data.get("error"):
            words, error = self._complaint(data, "")
            code = error.get("code")
            raise Refused(code if isinstance(code, int) else 500, words, error)
        return data

    def _complaint(self, data: Any, text: str) -> tuple[str, dict[str, Any]]:
        """A server's own words for what is wrong, never with our key in them, and the object that they are from."""
        error = data.get("error", data) if isinstance(data, dict) else None
        found = error if isinstance(error, dict) else {}
        words = found.get("message") or found.get("detail") or found.get("error")
        if isinstance(error, str):
            words = error
        if words is None:
            words = text
        if not isinstance(words, str):
            words = json.dumps(words, ensure_ascii=False)
        words = words.strip()[:_WORDS_LENGTH]
        return (words.replace(self._key, "(the key)") if self._key else words), found


def parse_url(text: str) -> str:
    """A base URL without its last slash; one without a path gets `/v1`. Raises UsageError, which does not repeat
    what may be a secret."""
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"engine openai: the base URL: {error}") from None
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UsageError(
            "engine openai: a base URL has no user, password or query; the key is read from OPENAI_API_KEY"
        )
    if parts.scheme not in ("http", "https") or not host:
        raise UsageError(
            f"engine openai: {text} is not a base URL like http://127.0.0.1:8000/v1 or https://HOST/v1"
        )
    path = parts.path.rstrip("/") or "/v1"
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def _proxy_for(url: str) -> str | None:
    """By the environment. Not left to aiohttp, which would read `.netrc` for each request, and take a password from there
    to our key."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.netloc) else getproxies().get(parts.scheme)


def _cut(error: Exception) -> Cut:
    unsent = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
    words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Cut(words, sent=not unsent, slow=isinstance(error, aiohttp.SocketTimeoutError))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


async def _drain(events: AsyncIterator[bytes]) -> None:
    """What is left of a stream that has said that it is done: only then can its connection be used again."""
    with contextlib.suppress(TimeoutError, *_FAULTS):
        async with asyncio.timeout(_DRAIN_SECONDS):
            async for _ in events:
                pass


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events. Lines end with LF or CRLF alone, not with every character that Unicode calls a
    line's end: answers have such."""
    rest, data = b"", []
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []
    if data:
        yield b"\n".join(data)
