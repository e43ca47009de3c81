"""Counts requests and their responses."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnmill.gateway.gateway import Gateway

_OF_OPENAI = re.compile(r"(?:/runs/[^/]*(?:/attempts/[^/]*)?)?/v1/(.*)", re.DOTALL)
"""Names of runs, attempts and models are the client's, and may be `v1`."""


class Counting:
    """ASGI middleware: an endpoint is a path without run and attempt."""

    def __init__(self, app: ASGIApp, gateway: Callable[[], Gateway]) -> None:
        self._app, self._gateway = app, gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        counts, status, started = self._gateway().counts, 500, time.monotonic()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        counts.under_way += 1
        try:
            await self._app(scope, receive, noting)
        finally:
            counts.under_way -= 1
            endpoint = _endpoint(scope["path"], status)
            counts.responded(endpoint, status, time.monotonic() - started)


def _endpoint(path: str, status: int) -> str:
    """A bounded number of names, whatever is asked."""
    if status in (404, 405):
        return "other"
    if of_openai := _OF_OPENAI.fullmatch(path):
        tail = of_openai[1]
        return "/v1/models" if tail.startswith("models") else f"/v1/{tail}"
    return "/runs" if path.startswith("/runs/") else path
