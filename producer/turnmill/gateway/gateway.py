"""All that the endpoints of one gateway share, from its first request to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Self, TypeVar

from redis.exceptions import RedisError
from starlette.requests import ClientDisconnect, Request

from turnmill.api_keys import ApiKey
from turnmill.errors import TurnmillError
from turnmill.faults import patiently
from turnmill.gateway.access import Access, Asker
from turnmill.gateway.answers import Answers
from turnmill.gateway.attempts import AttemptReport, Attempts
from turnmill.gateway.background import Background
from turnmill.gateway.errors import ApiError
from turnmill.gateway.hangups import HungUp
from turnmill.gateway.holds import Holds
from turnmill.gateway.lanes import Lanes
from turnmill.gateway.metrics import Counts
from turnmill.gateway.placed import Desk
from turnmill.gateway.requests import Question
from turnmill.gateway.served import Served
from turnmill.gateway.settings import GatewaySettings
from turnmill.tasks import end_tasks

READY_SECONDS = 2.0
"""How long Redis may take to answer a gateway that calls itself ready."""

Result = TypeVar("Result")


class Gateway:
    """Used as a context, in the event loop that serves."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.draining = False
        self._redis = settings.farm.connect()
        self._background = Background()
        self._holds = Holds(self._redis, settings)
        self._lanes = Lanes(settings)
        self.access = Access(self._redis, settings)
        self.attempts = Attempts(self._redis, settings)
        self.counts = Counts()
        self.served = Served(self._redis, settings)
        desk = Desk.of(
            self._redis, settings, self._holds, self.attempts, self.counts, self._background
        )
        self.answers = Answers(desk, self._lanes)
        self._upkeep: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        for upkeep in (self._holds.keep_up(), self._lanes.keep_tidy()):
            self._upkeep.append(asyncio.get_running_loop().create_task(upkeep))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.draining = True
        await end_tasks(self._upkeep)
        await self._background.close()
        await self._lanes.close()
        await self._redis.aclose(close_connection_pool=True)

    async def asker(self, request: Request) -> Asker:
        """Who asks, and in which attempt of which run: by the URL, else by headers."""
        headers, path = request.headers, request.path_params
        run = path.get("run") or headers.get("x-turnmill-run")
        attempt = path.get("attempt") or headers.get("x-turnmill-attempt")

        async def enter() -> ApiKey | None:
            key = await self.access.key_of(headers.get("authorization"))
            await self.access.enter(key, run, attempt)
            return key

        key = await self._patiently(enter, "finding who asks")
        retries = headers.get("x-stainless-retry-count", "")
        again = retries.isascii() and retries.isdecimal() and retries.strip("0") != ""
        return Asker(key, run, attempt, headers.get("idempotency-key"), again)

    async def admit(self, question: Question, asker: Asker) -> None:
        """See that the question may be asked now. Raises ApiError."""

        async def admit() -> None:
            # A run waits for workers that were killed, as all runs do.
            await self.served.check(question.model, asker.key, may_wait=asker.run is not None)
            await self.served.make_room(question.model, asker.key, len(question.turns))
            await self.access.own(asker)  # what is refused makes no run anybody's
            await self.attempts.enter(asker)

        await self._patiently(admit, "admitting a request")

    async def _patiently(self, work: Callable[[], Awaitable[Result]], doing: str) -> Result:
        """A Redis that is away for a moment costs time, and no request."""
        return await patiently(work, patience=self.settings.patience, doing=doing)

    async def body(self, request: Request) -> bytes:
        """The body of a request, if it is not too large. Raises ApiError, and HungUp."""
        most = self.settings.max_body
        too_large = ApiError(413, f"the body is larger than {most} bytes", code="body_too_large")
        length = request.headers.get("content-length", "0")
        if length.isascii() and length.isdecimal() and int(length) > most:
            raise too_large
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_large
        except ClientDisconnect:
            raise HungUp from None
        return bytes(body)

    async def unready(self) -> str:
        """Why requests should go elsewhere, or nothing."""
        if self.draining:
            return "draining"
        try:
            async with asyncio.timeout(READY_SECONDS):
                await self._redis.ping()
        except (RedisError, OSError, TimeoutError, TurnmillError):
            return "Redis is away"
        return ""

    async def report(self, asker: Asker) -> AttemptReport:
        """What the asker's attempt was answered so far."""
        await self._background.settled()
        return await self.attempts.report(asker.run or "", asker.attempt or "")

    async def models(self, request: Request) -> list[dict[str, Any]]:
        """The models that the asker may use now, as OpenAI lists them; with the context of the largest worker."""
        key = await self.access.key_of(request.headers.get("authorization"))
        served = await self.served.models(key)
        return [
            {
                "id": model,
                "object": "model",
                "created": int(min(worker.started for worker in workers)),
                "owned_by": "turnmill",
                "max_model_len": max(worker.context for worker in workers),
            }
            for model, workers in sorted(served.items())
        ]
