"""How one attempt at a run asks: every turn afresh once, however many conversations share it, and again, once,
what is stored with an ending that need not stay."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal, get_args

from turnmill.client import Client
from turnmill.errors import RedisUnusable
from turnmill.faults import patiently
from turnmill.reply import Reply
from turnmill.store import Ending
from turnmill.tasks import end_tasks
from turnmill.turn import Turn
from turnmill.wire import decode

log = logging.getLogger("turnmill.run")

Again = Literal["capped-context", "capped-output", "failed"]
"""A stored ending that a run may ask again: a reply that met a cap, or what failed for good."""

AGAIN: tuple[Again, ...] = get_args(Again)


LASTING: Final = frozenset({"poison", "invalid_request"})
"""Failures that stay, as ENQUEUE has it: asking afresh does not ask them again, `failed` does."""


def is_stale(ending: Ending, again: Collection[Again], context: int) -> bool:
    """Whether a stored ending is a reply that need not stay. `context`: the largest, in tokens, of the workers that
    live; 0 if none is known."""
    if not isinstance(ending, Reply) or ending.capped is None:
        return False
    if f"capped-{ending.capped}" in again:
        return True
    # A prompt alone that fills the larger context, too, would be capped again.
    return (
        ending.capped == "context"
        and ending.limit is not None
        and max(ending.limit, ending.usage.prompt_tokens) < context
    )


@dataclass(frozen=True)
class Asked:
    """How a turn ended. `new`: it was put into the queue for this ask. `before`: it had ended before this attempt."""

    ending: Ending
    new: bool
    before: bool


class Asking:
    """The asks of one attempt, made through one Client.

    `again`: the stored endings that are asked again. Without it, too, a reply that met a smaller context than
    `context` is: the largest, in tokens, of the workers that live (0: none is known).
    """

    def __init__(self, client: Client, again: Collection[Again] = ()) -> None:
        self._client, self._again = client, frozenset(again)
        self.context = 0
        self._may_drop = True
        self._met: set[str] = set()
        self._new: set[str] = set()
        self._dropping: dict[str, asyncio.Task[None]] = {}

    async def ask(self, turn: Turn, *, going: bool) -> Asked:
        """Ask for one turn, and wait until it has ended. `going`: the next turn of a conversation under way."""
        fresh = turn.hash not in self._met
        self._met.add(turn.hash)
        dropping = self._dropping.get(turn.hash)
        if dropping is not None:
            await asyncio.shield(dropping)
        ended, ending = await self._ask(turn, going, fresh=fresh)
        if dropping is None and self._is_stale(ending):
            # Whoever shares the turn may have been given the same reply: it is dropped once, for all of them.
            if turn.hash not in self._dropping:
                self._dropping[turn.hash] = asyncio.create_task(self._drop(turn))
                self._new.discard(turn.hash)
            await asyncio.shield(self._dropping[turn.hash])
            ended, ending = await self._ask(turn, going, fresh=False)
        shared = turn.hash in self._new
        if not ended:
            self._new.add(turn.hash)
        return Asked(ending, new=not (ended or shared), before=ended and not shared)

    async def close(self) -> None:
        await end_tasks(self._dropping.values())

    async def _ask(self, turn: Turn, going: bool, *, fresh: bool) -> tuple[bool, Ending]:
        """Whether the turn had ended when it was asked, and how it ended."""
        state, ending = await self._client.ask_stating(
            turn, going=going, retry_failed="failed" in self._again, fresh=fresh
        )
        return state in ("answered", "failed"), ending

    def _is_stale(self, ending: Ending) -> bool:
        return is_stale(ending, self._again, self.context if self._may_drop else 0)

    async def _drop(self, turn: Turn) -> None:
        """Drop the stored reply, if it is still one that need not stay."""
        client = self._client
        key = client.farm.keys.reply(turn.hash)
        stored = await patiently(
            lambda: client.store.redis.get(key), patience=None, doing="reading a reply"
        )
        if stored is not None and self._is_stale(decode(Reply, stored)):
            digest = hashlib.sha1(stored).hexdigest()
            try:
                await patiently(
                    lambda: client.queue.forget(turn.model, [(turn.hash, digest)]),
                    patience=None,
                    doing="dropping a reply",
                )
            except RedisUnusable as refused:
                if self._again & {"capped-context", "capped-output"}:
                    raise
                # Nobody asked for it on purpose, and a producer need not have the right.
                if self._may_drop:
                    log.warning("replies that met a smaller context are kept: %s", refused)
                self._may_drop = False
