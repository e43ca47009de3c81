"""One turn that a client asks for: put into the queue as the right draw, waited for, delivered or left."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TypeVar

from redis.asyncio import Redis

from turnmill.client import Client
from turnmill.draws import any_draw, nth_draw
from turnmill.errors import OtherDraw
from turnmill.faults import patiently
from turnmill.gateway.access import Asker
from turnmill.gateway.attempts import Attempts, Guesses
from turnmill.gateway.background import Background
from turnmill.gateway.errors import of_failure, refused
from turnmill.gateway.holds import Held, Holds
from turnmill.gateway.metrics import Counts
from turnmill.gateway.settings import GatewaySettings
from turnmill.queue import Draw, Queue, State
from turnmill.reading import Delta
from turnmill.reply import Failure, Reply
from turnmill.store import Ending
from turnmill.turn import Turn

LATE_SECONDS = 5.0
"""How much later than the queue we give up a turn whose time is up: a worker should have said so."""
REPEATABLE_SECONDS = 86_400
LARGE_BODY = 256 << 10
"""Bytes; what is larger is hashed in a thread."""
BASE_DIGITS = 32
"""Of a hash: enough to tell apart the bodies of a scope, where each costs memory."""


Result = TypeVar("Result")


@dataclass(frozen=True)
class Desk:
    """What is needed to ask for turns. `id`: this gateway's."""

    redis: Redis
    settings: GatewaySettings
    holds: Holds
    attempts: Attempts
    counts: Counts
    background: Background
    guesses: Guesses
    id: str

    @classmethod
    def of(
        cls,
        redis: Redis,
        settings: GatewaySettings,
        holds: Holds,
        attempts: Attempts,
        counts: Counts,
        background: Background,
    ) -> Desk:
        id = secrets.token_hex(4)
        return cls(redis, settings, holds, attempts, counts, background, Guesses(), id)


class Placed:
    """A turn asked for once, for one choice. Whoever makes it calls `leave` in the end.

    `base`: the turn without its sample number. `index`: which choice of the request it is for.
    """

    def __init__(self, desk: Desk, client: Client, asker: Asker, base: Turn, index: int) -> None:
        self._desk, self._client, self._asker = desk, client, asker
        self._queue = Queue(desk.redis, desk.settings.farm.keys)
        self._index = index
        self._going = any(message.role == "assistant" for message in base.messages)
        self._again = asker.again
        self._stream = False
        self._draw: Draw | None = None
        self._held: Held | None = None
        self._held_at = 0.0
        self._ended = False
        self._end: float | None = None
        if desk.settings.deadline is not None:
            self._end = asyncio.get_running_loop().time() + desk.settings.deadline + LATE_SECONDS
        self.base = self.turn = base
        self.state: State = "unknown"

    # Asking

    async def _ask(self) -> None:
        """Put the turn into the queue. Raises ApiError, and what the Client raises."""
        if self.base.shared:
            await self._submit(self.base)
            return
        asker, base = self._asker, self.base.hash[:BASE_DIGITS]
        if (number := await self._repeated(base)) is not None:
            await self._submit_known(number)
            return
        counted = asker.attempt is not None
        number = self._desk.guesses.take(asker.scope, base) if counted else any_draw()
        self._draw = draw = Draw(asker.scope, base, self._owner, number, counted, self._again)
        try:
            await self._submit(await self._numbered(number), draw)
        except OtherDraw as other:
            self._draw = draw = replace(draw, number=other.number)
            if counted and not self._again:
                self._desk.guesses.correct(asker.scope, base, other.number)
            await self._submit_known(other.number)
        await self._make_repeatable(draw)

    @property
    def _owner(self) -> str:
        if self._asker.idempotency is None:
            return f"{self._desk.id}.{secrets.token_hex(8)}"
        return f"i.{_digest(self._asker.idempotency)}.{self._index}"

    async def _numbered(self, number: int) -> Turn:
        run = self._asker.run
        sample = nth_draw(run, number) if run and self._asker.attempt else number
        turn = self.base.model_copy(update={"sample": sample})
        if len(self.base.body) > LARGE_BODY:
            await asyncio.to_thread(lambda: turn.hash)
        return turn

    async def _submit_known(self, number: int) -> None:
        """A draw that is ours already."""
        turn = await self._numbered(number)
        while True:
            try:
                return await self._submit(turn)
            except OtherDraw:  # somebody's guess had the same hash, was wrong, and is gone now
                continue

    async def _ask_again(self) -> None:
        """The same turn, which was cancelled though we wait for it."""
        await self._submit(self.turn)

    async def _submit(self, turn: Turn, draw: Draw | None = None) -> None:
        self._release()
        if self._asker.run is None:
            held = (turn.model, turn.hash, self._asker.lane)
            self._held_at = time.monotonic()
            await self._desk.holds.hold(held)
            self._held = held
        self.turn = turn
        self.state = await self._client.submit_stating(
            turn, going=self._going, stream=self._stream, draw=draw
        )

    # Requests that a client has given a name

    async def _repeated(self, base: str) -> int | None:
        """The draw of an earlier request of the same name."""
        if self._asker.idempotency is None:
            return None
        known = await self._desk.redis.hmget(self._repeatable, ["base", str(self._index)])  # type: ignore[misc]
        if known[0] is not None and known[0].decode() != base:
            text = "this Idempotency-Key was used for another request"
            raise refused("Idempotency-Key", text, "idempotency_key_reused")
        return None if known[1] is None else int(known[1])

    async def _make_repeatable(self, draw: Draw) -> None:
        if self._asker.idempotency is None:
            return
        # It may have been asked, answered and settled elsewhere since we looked: then that draw is its own.
        if (number := await self._repeated(draw.base)) not in (None, draw.number):
            self._draw = None
            await self._queue.settle(draw, delivered=True)
            await self._submit_known(number)
            return
        pipe = self._desk.redis.pipeline(transaction=True)
        pipe.hset(self._repeatable, mapping={"base": draw.base, str(self._index): draw.number})
        pipe.expire(self._repeatable, REPEATABLE_SECONDS)
        await pipe.execute()

    @property
    def _repeatable(self) -> str:
        keys = self._desk.settings.farm.keys
        return keys.repeatable(self._asker.scope, _digest(self._asker.idempotency or ""))

    # Hearing

    async def reply(self) -> Reply:
        """Ask, and wait for the reply. Raises ApiError for a turn that failed."""
        await self._ask()
        while self._orphaned(ending := await self._in_time(self._wait())):
            await self._ask_again()
        return self._judged(ending)

    async def growing(self) -> AsyncIterator[Delta | Reply]:
        """Ask; then pieces of the answer's text, and the reply. The answer is delivered with the first of them. Raises
        ApiError for a turn that failed."""
        self._stream = True
        ask = self._ask
        while True:
            await ask()
            ask, delivered = self._ask, False
            items = self._client.stream(self.turn, going=self._going)
            async with aclosing(items):
                while True:
                    item = await self._in_time(anext(items))
                    if not delivered and self._orphaned(item):
                        ask = self._ask_again
                        break
                    heard = item if isinstance(item, Delta) else self._judged(item)
                    if not delivered and not (delivered := await self.deliver()):
                        break
                    if isinstance(heard, Reply):
                        self.count(heard)
                        yield heard
                        return
                    yield heard

    async def deliver(self) -> bool:
        """The answer is about to be given. False: another request has taken the draw over; ask again, for another."""
        if self._draw is None:
            return True
        draw, self._draw = self._draw, None
        settled = await patiently(
            lambda: self._queue.settle(draw, delivered=True),
            patience=self._desk.settings.patience,
            doing="noting that an answer is given",
        )
        if settled or self._asker.idempotency is not None:
            return True
        self._again = False
        return False

    def _orphaned(self, item: Delta | Ending) -> bool:
        """Whether the turn was cancelled only because others thought that nobody waits here."""
        return (
            isinstance(item, Failure)
            and item.kind == "cancelled"
            and self._held is not None
            and self._desk.holds.lapsed(self._held_at)
        )

    def _judged(self, ending: Ending) -> Reply:
        self._ended = True
        if isinstance(ending, Failure):
            self._count("failed")
            raise of_failure(ending)
        if (
            ending.capped == "context"
            and not ending.usage.completion_tokens
            and not self._asker.run
        ):
            prompt, limit = ending.usage.prompt_tokens, ending.limit
            raise refused(
                "messages",
                f"This model's maximum context length is {limit} tokens. However, your prompt has "
                f"{prompt} tokens, which leaves no room for an answer.",
                "context_length_exceeded",
            )
        return ending

    async def _in_time(self, awaitable: Awaitable[Result]) -> Result:
        """A worker says when the time of a turn is up; without one, we do."""
        try:
            async with asyncio.timeout_at(self._end):
                return await awaitable
        except TimeoutError:
            late = Failure(hash=self.turn.hash, kind="deadline", text="its time was up", tries=0)
            raise of_failure(late) from None

    async def _wait(self) -> Ending:
        _, ending = await self._client.ask_stating(self.turn, going=self._going, fresh=False)
        return ending

    # Ending

    def count(self, reply: Reply) -> None:
        """The reply was delivered."""
        self._count("stored" if self.state == "answered" else "made", reply)

    def _count(self, what: str, reply: Reply | None = None) -> None:
        self._desk.counts.ended(what, reply)
        if self._asker.attempt is not None:
            self._desk.background.start(self._desk.attempts.count(self._asker, what, reply))

    def leave(self) -> None:
        """Nobody waits here any more: what was not delivered is left to whoever asks again."""
        if self._draw is not None:
            self._desk.background.start(self._queue.settle(self._draw, delivered=False))
            self._draw = None
        self._release()

    def _release(self) -> None:
        if self._held is None:
            return
        self._desk.holds.let_go(self._held)
        if self._ended:
            self._desk.background.start(self._desk.holds.spent(self._held))
        self._held = None


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]
