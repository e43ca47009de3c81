"""A run: many conversations through the queue, resumable by asking again.

Nothing of a run's progress is kept but what the queue keeps: replies by request hash. Run again from the
start, each conversation is answered from the store up to its first unanswered turn.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from turnmill.asking import Asking
from turnmill.client import Client
from turnmill.converse import converse, open_session
from turnmill.engines_met import EnginesMet
from turnmill.errors import EngineChanged, TurnFailed
from turnmill.faults import patiently
from turnmill.holdings import Holdings
from turnmill.journal import Journal
from turnmill.lines import Item
from turnmill.manifest import check_unchanged, manifest_of
from turnmill.output import RunFiles
from turnmill.ownership import sole_producer
from turnmill.rehearsal import Rehearsal
from turnmill.reply import EngineIdentity, Failure, Reply
from turnmill.results import ConversationResult, Outcome, Report
from turnmill.run_settings import RunSettings
from turnmill.scaffolds.base import Scaffold
from turnmill.session import Session, Stopped
from turnmill.tasks import end_tasks
from turnmill.turn import Turn

log = logging.getLogger("turnmill.run")

REFRESH_SECONDS = 2.0
STORE_SECONDS = 0.3
"""A run that finds answers in the store has found some by then: it does not miss a worker."""
CANCELLED = "the run was cancelled"
FEWEST_AT_ONCE = 32
PER_SLOT = 2
"""Conversations at once for each slot of the live workers, so that a freed slot finds a turn waiting."""


@dataclass
class Progress:
    """Where a run is, now. `total`: conversations, each epoch counted. Turns: `asked` went into the queue,
    `stored` had ended before, or were asked by another conversation of this attempt."""

    total: int
    started: float = field(default_factory=time.monotonic)
    running: int = 0
    asked: int = 0
    stored: int = 0
    tokens: int = 0
    workers: int = 0
    slots: int = 0
    outcomes: dict[Outcome, int] = field(
        default_factory=lambda: {"completed": 0, "capped": 0, "failed": 0, "cancelled": 0}
    )

    @property
    def ended(self) -> int:
        return sum(self.outcomes.values())

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


@dataclass(frozen=True)
class RunEnd:
    """How an attempt at a run ended. `budget_spent`: it stopped because too many conversations failed.
    `cancelled`: it stopped because somebody cancelled the run. `unfinished`: conversations that have not
    ended. `tokens_made`: completion tokens of this attempt."""

    report: Report
    budget_spent: bool
    cancelled: bool
    unfinished: int
    tokens_made: int


class Run:
    """One attempt at a run. `drive` may be called once."""

    def __init__(
        self,
        settings: RunSettings,
        items: Sequence[Item],
        scaffold: Scaffold[Any],
        client: Client,
        files: RunFiles,
    ) -> None:
        self.settings, self._items, self._scaffold = settings, items, scaffold
        self._client, self._files = client, files
        self._journal = Journal(client, settings.name)
        self._asking = Asking(client, settings.again)
        self._engines = EnginesMet(client.store.redis, client.farm.keys, settings.name)
        self._met_some = False
        self._all_stored: tuple[frozenset[EngineIdentity], int] | None = None
        """With which engines, and which context, there was nothing to ask."""
        self._changed: EngineChanged | None = None
        self.progress = Progress(total=len(items) * settings.epochs)
        self._results: dict[tuple[str, int], ConversationResult] = {}
        self._stopping = self._cancelled = False
        self._failed_now = 0

    async def drive(self) -> RunEnd:
        """Drive every conversation to its end, or as far as the failure budget goes.

        Raises RunInUse, ManifestChanged, EngineChanged, CannotWrite, RedisUnusable. Cancelled, it leaves everything so
        that the next attempt goes on.
        """
        redis, keys = self._client.store.redis, self._client.farm.keys
        producer = sole_producer(redis, keys.producer(self.settings.name), self.settings.name)
        async with producer as usurped:
            await patiently(self._check_manifest, patience=None, doing="reading the run's manifest")
            await self._engines.read()
            await patiently(
                lambda: self._client.store.begin(self.settings.name),
                patience=None,
                doing="beginning the run",
            )
            holdings = Holdings(redis, keys, patience=None)
            await holdings.keep(self.settings.name, None)
            driver = asyncio.create_task(self._drive_all())
            either: list[asyncio.Future[Any]] = [driver, usurped]
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if usurped.done():
                    usurped.result()  # another producer's answers would be mixed with ours
                end = await driver
                if not end.unfinished and self.settings.keep is not None:
                    await holdings.keep(self.settings.name, self.settings.keep)
                return end
            finally:
                await end_tasks([driver])

    async def _drive_all(self) -> RunEnd:
        waiting = iter(self._in_order())
        ended: asyncio.Queue[asyncio.Task[None] | None] = asyncio.Queue()
        tasks: set[asyncio.Task[None]] = set()
        await self._look_around()
        refresher = asyncio.create_task(self._keep_looking(lambda: ended.put_nowait(None)))
        refresher.add_done_callback(ended.put_nowait)
        try:
            while True:
                while len(tasks) < self._at_once() and not self._is_over:
                    one = next(waiting, None)
                    if one is None:
                        break
                    task = asyncio.create_task(self._converse(*one))
                    task.add_done_callback(ended.put_nowait)
                    tasks.add(task)
                self.progress.running = len(tasks)
                if not tasks:
                    break
                if one_ended := await ended.get():  # None: more may be allowed at once
                    tasks.discard(one_ended)
                    one_ended.result()
        finally:
            await end_tasks([*tasks, refresher])
            await self._asking.close()
        # What it had asked may be gone sooner than the look that found another engine is over.
        if self._changed is not None:
            raise self._changed
        return await self._finish()

    @property
    def _is_over(self) -> bool:
        """No conversation begins any more."""
        return self._stopping or self._cancelled or self._changed is not None

    def _in_order(self) -> Iterator[tuple[Item, int]]:
        """The epochs of an item one after the other: its prompt is in the engine's cache then."""
        return ((item, epoch) for item in self._items for epoch in range(self.settings.epochs))

    async def _finish(self) -> RunEnd:
        keys = [(item.id, epoch) for item, epoch in self._in_order()]
        ordered = [self._results[key] for key in keys if key in self._results]
        hashes = [turn.hash for result in ordered for turn in result.turns]
        engines = await patiently(
            lambda: self._client.store.engines(hashes), patience=None, doing="reading traces"
        )
        report = Report.of(
            ordered,
            run=self.settings.name,
            seconds=round(self.progress.seconds, 3),
            engines=engines,
            from_store=self.progress.stored,
            asked=self.progress.asked,
        )
        unfinished = self.progress.total - len(ordered)
        if unfinished:
            self._files.write_report(report)
        else:
            self._files.finish(ordered, report)
        failed = report.outcomes.failed
        spent = self._stopping or self.settings.max_failures.spent(failed, len(ordered))
        return RunEnd(report, spent, self._cancelled, unfinished, self.progress.tokens)

    # One conversation

    async def _converse(self, item: Item, epoch: int) -> None:
        session = open_session(
            self.settings, self._journal, item, epoch, self._answer, self._check_going
        )
        conversed = await converse(self._scaffold, item, epoch, session)
        if conversed is not None:
            self._failed_now += conversed.failed_now
            self._ended(conversed.result)

    def _check_going(self) -> None:
        if self._is_over:
            raise Stopped

    def _ended(self, result: ConversationResult) -> None:
        self._files.append(result)
        self._results[result.key] = result
        outcomes = self.progress.outcomes
        outcomes[result.outcome] += 1
        # What had failed before this attempt is told first, and says nothing of how this one goes.
        budget = self.settings.max_failures
        if not self._stopping and budget.spent(self._failed_now, self.progress.ended):
            log.error(
                "%d of %d conversations failed: over the budget of %s; nothing more is enqueued",
                self._failed_now,
                self.progress.ended,
                budget,
            )
            self._stopping = True

    async def _answer(self, turn: Turn, session: Session) -> Reply:
        """The reply to the next turn of a conversation. Raises TurnFailed."""
        if self._cancelled and session.cancelled is None:  # told once: some scaffolds try again
            raise TurnFailed(Failure(hash=turn.hash, kind="cancelled", text=CANCELLED, tries=0))
        self._check_going()
        asked = await self._asking.ask(turn, going=bool(session.turns))
        session.ended_before = asked.before
        if asked.new:
            self.progress.asked += 1
        else:
            self.progress.stored += 1
        if isinstance(asked.ending, Failure):
            if self._changed is not None and asked.ending.kind == "cancelled":
                raise Stopped
            if (
                asked.ending.kind == "cancelled" and not self._cancelled
            ):  # the turn alone, or the run?
                await self._look_whether_cancelled()
            raise TurnFailed(asked.ending)
        if asked.new:
            self.progress.tokens += asked.ending.usage.completion_tokens
        return asked.ending

    # How many at once

    def _at_once(self) -> int:
        return self.settings.concurrency or max(FEWEST_AT_ONCE, PER_SLOT * self.progress.slots)

    async def _keep_looking(self, seen: Callable[[], None]) -> None:
        """Look around, again and again; `seen` is called after each look."""
        progress, warned = self.progress, False
        await asyncio.sleep(STORE_SECONDS)
        while True:
            begun = progress.asked + progress.stored
            if not (progress.workers or warned or begun):
                log.warning("no live worker serves %s; waiting for one", self.settings.model)
            warned = not progress.workers
            await asyncio.sleep(REFRESH_SECONDS)
            await self._look_around()
            seen()

    async def _look_around(self) -> None:
        """Who lives and serves this model, and whether the run goes on."""
        store = self._client.store
        workers = await patiently(store.workers, patience=None, doing="reading which workers live")
        mine = [worker for worker in workers if worker.model == self.settings.model]
        self.progress.workers = len(mine)
        self.progress.slots = sum(worker.slots for worker in mine)
        self._asking.context = max((worker.context for worker in mine), default=0)
        await self._check_engines([worker.engine for worker in mine])
        await self._look_whether_cancelled()

    async def _check_engines(self, live: Sequence[EngineIdentity]) -> None:
        """Raises EngineChanged if an attempt would go on with another engine than those before; what it had asked
        leaves the queue then."""
        if not live:
            return
        if not (self._met_some or self.settings.allow_mixed):
            changed = self._engines.changed(live)
            if changed is not None:
                look = (frozenset(live), self._asking.context)
                if look == self._all_stored or await self._is_all_stored():
                    self._all_stored = look  # to go through all of it takes as long as the run
                    return
                self._changed = changed
                await self._client.cancel(self._client.waiting)
                raise changed
        self._met_some = True
        await self._engines.meet(live)

    async def _is_all_stored(self) -> bool:
        context = self._asking.context
        rehearsal = Rehearsal(self.settings, self._items, self._scaffold, self._client, context)
        return (await rehearsal.look()).nothing_to_ask

    async def _look_whether_cancelled(self) -> None:
        client, name = self._client, self.settings.name
        stopped = self._cancelled or await patiently(
            lambda: client.store.stopped(name), patience=None, doing="reading the run"
        )
        if not stopped:
            return
        if not self._cancelled:  # many look at once
            self._cancelled = True
            log.warning("%s; nothing more is enqueued", CANCELLED)
        # Else its turns, which are only marked, would end when a worker clears them.
        await client.cancel(client.waiting)

    # What the run is

    async def _check_manifest(self) -> None:
        name, store = self.settings.name, self._client.store
        manifest = manifest_of(self.settings, self._scaffold, self._items)
        before = await store.manifest(name)
        if before is not None and not self.settings.extend:
            check_unchanged(name, before, manifest)
        if before != manifest:
            await store.redis.set(self._client.farm.keys.manifest(name), to_json(manifest))
