"""Server-sent events, as OpenAI's clients read them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from turnmill.gateway.errors import of_exception
from turnmill.gateway.hangups import until_gone
from turnmill.gateway.metrics import Counts
from turnmill.tasks import end_tasks

log = logging.getLogger("turnmill.gateway")

DONE = b"data: [DONE]\n\n"
WAITING = b": waiting\n\n"
"""A comment: keeps proxies from closing a connection on which nothing moves."""
WAITING_SECONDS = 15.0


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + to_json(data, inf_nan_mode="null") + b"\n\n"


class EventStream(Response):
    """Chunks as events, then `[DONE]`; or, if they end with an error, that as an event. The chunks are closed when the
    client hangs up."""

    media_type = "text/event-stream"

    def __init__(
        self, first: dict[str, Any], rest: AsyncGenerator[dict[str, Any]], counts: Counts
    ) -> None:
        # Not Response's own: it has a body, and says how long it is.
        self.status_code, self.background = 200, None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._first, self._rest, self._counts = first, rest, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        last = asyncio.get_running_loop().time()

        async def write(data: bytes, more: bool = True) -> None:
            nonlocal last
            last = asyncio.get_running_loop().time()
            await send({"type": "http.response.body", "body": data, "more_body": more})

        async def keep_open() -> None:
            while True:
                pause = last + WAITING_SECONDS - asyncio.get_running_loop().time()
                if pause <= 0:
                    await write(WAITING)
                await asyncio.sleep(max(pause, 0.1))

        writer = asyncio.ensure_future(self._write(write))
        gone = asyncio.ensure_future(until_gone(receive))
        keeper = asyncio.ensure_future(keep_open())
        try:
            await asyncio.wait({writer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not writer.done():
                self._counts.hang_ups += 1
        finally:
            await end_tasks([writer, gone, keeper])
            await self._rest.aclose()
        if not writer.cancelled():
            await writer
            await write(b"", more=False)

    async def _write(self, write: Any) -> None:
        try:
            await write(event(self._first))
            async for chunk in self._rest:
                await write(event(chunk))
            await write(DONE)
        except Exception as error:
            refusal = of_exception(error)
            if refusal.status == 500:
                log.error("a stream ended: %s", refusal.message, exc_info=error)
            await write(b"data: " + refusal.body + b"\n\n")
