"""A dry run: what a run would ask, and what is stored of it. Nothing is asked, and nothing is written."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from turnmill.asking import LASTING, is_stale
from turnmill.client import Client
from turnmill.converse import converse, open_session
from turnmill.errors import TurnFailed
from turnmill.faults import patiently
from turnmill.journal import Journal
from turnmill.lines import Item
from turnmill.reply import Failure, Reply
from turnmill.results import Caps, ConversationResult, Outcomes, Report, TurnResult
from turnmill.run_settings import RunSettings
from turnmill.scaffolds.base import Scaffold
from turnmill.session import Session, Stopped
from turnmill.store import READ_BATCH, Ending
from turnmill.tasks import end_tasks
from turnmill.turn import Turn

_AT_ONCE: Final = 64
_NO_MODEL: Final = "?"


class Standing(BaseModel):
    """Conversations, each epoch counted. `complete`: all that they ask has ended; `begun`: some of it."""

    model_config = ConfigDict(frozen=True)

    complete: int = 0
    begun: int = 0
    not_begun: int = 0


class Outlook(BaseModel):
    """What a run would do. `model`: None, if nobody knows yet what it would be.

    `outcomes` are those of the complete conversations; `capped` and `failures` count what is stored, as in a Report.
    Turns: `stored` ended before, counted for each conversation; `next` are asked first, each counted once; of these,
    `queued` are in the queue already, and `again` had ended in a way that is asked again. `effects`
    are done first where it is not a turn that comes next.
    """

    model_config = ConfigDict(frozen=True)

    run: str
    model: str | None
    conversations: Standing
    outcomes: Outcomes
    capped: Caps
    failures: dict[str, int]
    stored: int
    next: int
    queued: int
    again: int
    effects: int

    @property
    def nothing_to_ask(self) -> bool:
        return not (self.conversations.begun or self.conversations.not_begun)


class Rehearsal:
    """One look ahead at a run; `look` may be called once. `settings.model` is empty if it is not known: nothing is
    stored then. `context`: the largest, in tokens, of the workers that live."""

    def __init__(
        self,
        settings: RunSettings,
        items: Sequence[Item],
        scaffold: Scaffold[Any],
        client: Client,
        context: int = 0,
    ) -> None:
        self._model = settings.model
        # A turn must have a model; of this one nothing is stored.
        self._settings = settings if settings.model else replace(settings, model=_NO_MODEL)
        self._items, self._scaffold = items, scaffold
        self._client, self._context = client, context
        self._journal = Journal(client, settings.name)
        self._next: set[str] = set()
        self._again: set[str] = set()
        self._complete: list[ConversationResult] = []
        self._ended: list[TurnResult] = []
        self._looked_at = self._begun = self._effects = 0

    async def look(self) -> Outlook:
        """Drive every conversation as far as the store and the journal go. Raises what the run would."""
        waiting = self._in_order()
        tasks = [asyncio.create_task(self._rehearse(waiting)) for _ in range(_AT_ONCE)]
        try:
            await asyncio.gather(*tasks)
        finally:
            await end_tasks(tasks)
        complete = Report.of(self._complete, run=self._settings.name, seconds=0)
        failures = Counter(complete.failures)
        failures |= Counter(turn.failure.kind for turn in self._ended if turn.failure is not None)
        capped = sum(turn.capped == "output" for turn in self._ended)
        return Outlook(
            run=self._settings.name,
            model=self._model or None,
            conversations=Standing(
                complete=len(self._complete),
                begun=self._begun,
                not_begun=self._looked_at - len(self._complete) - self._begun,
            ),
            outcomes=complete.outcomes,
            capped=complete.capped.model_copy(update={"output": capped}),
            failures=dict(sorted(failures.items())),
            stored=len(self._ended),
            next=len(self._next),
            queued=await self._queued(),
            again=len(self._again),
            effects=self._effects,
        )

    def _in_order(self) -> Iterator[tuple[Item, int]]:
        return ((item, epoch) for item in self._items for epoch in range(self._settings.epochs))

    async def _rehearse(self, waiting: Iterator[tuple[Item, int]]) -> None:
        for item, epoch in waiting:
            session = open_session(
                self._settings, self._journal, item, epoch, self._answer, self._may_do
            )
            conversed = await converse(self._scaffold, item, epoch, session)
            self._looked_at += 1
            self._ended += session.turns
            if conversed is not None:
                self._complete.append(conversed.result)
            else:
                self._begun += bool(session.turns)

    async def _answer(self, turn: Turn, session: Session) -> Reply:
        """The stored reply. Raises Stopped where the run would ask, and TurnFailed for a failure that stays."""
        ending = await self._stored(turn.hash)
        if isinstance(ending, Reply) and not is_stale(ending, self._settings.again, self._context):
            return ending
        if isinstance(ending, Failure) and self._stays(ending):
            session.ended_before = True
            raise TurnFailed(ending)
        self._next.add(turn.hash)
        if ending is not None:
            self._again.add(turn.hash)
        raise Stopped

    def _may_do(self) -> None:
        self._effects += 1
        raise Stopped

    async def _stored(self, hash: str) -> Ending | None:
        if not self._model:
            return None
        endings = await patiently(
            partial(self._client.store.endings, self._settings.name, [hash]),
            patience=None,
            doing="reading replies",
        )
        return endings.get(hash)

    def _stays(self, failure: Failure) -> bool:
        return failure.kind in LASTING and "failed" not in self._settings.again

    async def _queued(self) -> int:
        """How many of the next turns some run waits for already."""
        redis, keys = self._client.store.redis, self._client.farm.keys
        hashes, queued = sorted(self._next - self._again), 0

        async def count(some: Sequence[str]) -> int:
            pipe = redis.pipeline(transaction=False)
            for hash in some:
                pipe.exists(keys.waiters(hash))
            return sum(await pipe.execute())

        for start in range(0, len(hashes), READ_BATCH):
            some = hashes[start : start + READ_BATCH]
            queued += await patiently(
                partial(count, some), patience=None, doing="reading the queue"
            )
        return queued
