"""A run: many conversations through the queue, resumable by asking again.

Nothing of a run's progress is kept but what the queue keeps: replies by request hash. Run again from the
start, each conversation is answered from the store up to its first unanswered turn.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import to_json

from turnmill.asking import Again, Asking
from turnmill.budget import FailureBudget
from turnmill.client import Client
from turnmill.draws import Draws
from turnmill.errors import ManifestChanged, RecordError, TurnFailed, TurnmillError, UsageError
from turnmill.faults import patiently
from turnmill.holdings import Holdings
from turnmill.journal import Journal
from turnmill.lines import Item
from turnmill.output import RunFiles
from turnmill.ownership import sole_producer
from turnmill.reply import Failure, Reply
from turnmill.results import ConversationResult, Outcome, Report
from turnmill.scaffolds.base import Ended, Scaffold
from turnmill.session import Session
from turnmill.tasks import end_tasks
from turnmill.turn import Sampling, Turn

log = logging.getLogger("turnmill.run")

REFRESH_SECONDS = 2.0
CANCELLED = "the run was cancelled"
FEWEST_AT_ONCE = 32
PER_SLOT = 2
"""Conversations at once for each slot of the live workers, so that a freed slot finds a turn waiting."""


@dataclass(frozen=True)
class RunSettings:
    """What a run is, beside its conversations.

    `sampling` is under each conversation's own. `epochs`: how often each conversation is held, with draws of
    its own each time. `seed`: makes every draw repeatable. `reuse`: draws are of this `run` alone, or shared by
    `all` runs that say so. `again`: stored endings that this attempt asks again. `concurrency`: conversations at
    once (None: from the slots of the workers that live). `extend`: take another manifest. `keep`:
    seconds until the run is forgotten, once it has ended (None: never).
    """

    name: str
    model: str
    scaffold: str = "multi_turn_chat"
    sampling: Sampling = field(default_factory=Sampling)
    epochs: int = 1
    seed: int | None = None
    reuse: Literal["run", "all"] = "run"
    concurrency: int | None = None
    max_failures: FailureBudget = field(default_factory=lambda: FailureBudget.parse("5%"))
    again: frozenset[Again] = frozenset()
    extend: bool = False
    keep: float | None = None


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


class _Stopped(BaseException):
    """The run stops enqueuing; the conversation stays where it is and goes on in the next attempt. No scaffold's
    `except Exception` is to hold it up."""


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
        self.progress = Progress(total=len(items) * settings.epochs)
        self._results: dict[tuple[str, int], ConversationResult] = {}
        self._stopping = self._cancelled = False
        self._failed_now = 0

    async def drive(self) -> RunEnd:
        """Drive every conversation to its end, or as far as the failure budget goes.

        Raises RunInUse, ManifestChanged, CannotWrite, RedisUnusable. Cancelled, it leaves everything so
        that the next attempt goes on.
        """
        redis, keys = self._client.store.redis, self._client.farm.keys
        producer = sole_producer(redis, keys.producer(self.settings.name), self.settings.name)
        async with producer as usurped:
            await patiently(self._check_manifest, patience=None, doing="reading the run's manifest")
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
        ended: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()
        tasks: set[asyncio.Task[None]] = set()
        await self._look_around()
        refresher = asyncio.create_task(self._keep_looking())
        try:
            while True:
                while len(tasks) < self._at_once() and not (self._stopping or self._cancelled):
                    one = next(waiting, None)
                    if one is None:
                        break
                    task = asyncio.create_task(self._converse(*one))
                    task.add_done_callback(ended.put_nowait)
                    tasks.add(task)
                self.progress.running = len(tasks)
                if not tasks:
                    break
                task = await ended.get()
                tasks.discard(task)
                task.result()
        finally:
            await end_tasks([*tasks, refresher])
            await self._asking.close()
        return await self._finish()

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
        session = self._session(item, epoch)
        try:
            end = await self._scaffold.drive(item, session)
            outcome: Outcome = "failed" if end.failed else "capped" if end.capped else "completed"
            self._failed_now += outcome == "failed"
        except _Stopped:
            return
        except TurnFailed as failed:
            end = Ended(session.messages, failed=str(failed))
            outcome = "cancelled" if failed.failure.kind == "cancelled" else "failed"
            self._failed_now += outcome == "failed" and not session.ended_before
        except RecordError as unreadable:  # as it was before this attempt
            end, outcome = Ended(session.messages, failed=str(unreadable)), "failed"
        except (UsageError, ValueError) as wrong:
            end, outcome = Ended(session.messages, failed=str(wrong)), "failed"
            self._failed_now += 1
        except TurnmillError:
            raise
        except (
            Exception
        ) as wrong:  # a scaffold is anybody's code: it ends one conversation, and not the run
            log.warning("conversation %s: the scaffold failed", item.id, exc_info=wrong)
            text = f"{type(wrong).__name__}: {wrong}"
            end, outcome = Ended(session.messages, failed=text), "failed"
            self._failed_now += 1
        capped = end.capped
        if capped is None and any(turn.capped == "output" for turn in session.turns):
            capped = "output"
        self._ended(
            ConversationResult(
                id=item.id,
                epoch=epoch,
                outcome=outcome,
                capped=capped,
                messages=list(end.messages),
                turns=session.turns,
                error=end.failed,
                ending=end.ending,
                score=end.score,
                details=_details(end, session),
            )
        )

    def _session(self, item: Item, epoch: int) -> Session:
        settings = self.settings
        origin = settings.name if settings.reuse == "run" else ""
        return Session(
            Draws(origin, item.id, epoch, settings.seed),
            self._journal,
            (item.id, epoch),
            Turn.model_construct(model=settings.model, sampling=settings.sampling),
            self._answer,
            self._check_going,
        )

    def _check_going(self) -> None:
        if self._stopping:
            raise _Stopped

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
        self._check_going()
        if self._cancelled:
            raise TurnFailed(Failure(hash=turn.hash, kind="cancelled", text=CANCELLED, tries=0))
        asked = await self._asking.ask(turn, going=bool(session.turns))
        session.ended_before = asked.before
        if asked.new:
            self.progress.asked += 1
        else:
            self.progress.stored += 1
        if isinstance(asked.ending, Failure):
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

    async def _keep_looking(self) -> None:
        progress, warned = self.progress, False
        while True:
            begun = progress.asked + progress.stored
            if not (progress.workers or warned or begun):
                log.warning("no live worker serves %s; waiting for one", self.settings.model)
            warned = not progress.workers
            await asyncio.sleep(REFRESH_SECONDS)
            await self._look_around()

    async def _look_around(self) -> None:
        """Who lives and serves this model, and whether the run goes on."""
        store = self._client.store
        workers = await patiently(store.workers, patience=None, doing="reading which workers live")
        mine = [worker for worker in workers if worker.model == self.settings.model]
        self.progress.workers = len(mine)
        self.progress.slots = sum(worker.slots for worker in mine)
        self._asking.context = max((worker.context for worker in mine), default=0)
        await self._look_whether_cancelled()

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
        redis, key = self._client.store.redis, self._client.farm.keys.manifest(self.settings.name)
        manifest = self._manifest()
        before = await self._client.store.manifest(self.settings.name)
        if before is not None and before != manifest and not self.settings.extend:
            changed = sorted(
                k for k in manifest.keys() | before.keys() if manifest.get(k) != before.get(k)
            )
            raise ManifestChanged(
                f"run {self.settings.name!r} was begun with other {', '.join(changed)}: "
                "choose another --run, or take the change with --extend"
            )
        if before != manifest:
            await redis.set(key, to_json(manifest))

    def _manifest(self) -> dict[str, Any]:
        return {
            "v": 1,
            "scaffold": self.settings.scaffold,
            "model": self.settings.model,
            "sampling": self.settings.sampling.model_dump(exclude_none=True),
            "epochs": self.settings.epochs,
            "seed": self.settings.seed,
            "reuse": self.settings.reuse,
            "conversations": {
                "count": len(self._items),
                "digest": _digest(item.digest for item in self._items),
            },
            **({"options": dict(self._scaffold.options)} if self._scaffold.options else {}),
        }


def _digest(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode())
    return digest.hexdigest()


def _details(end: Ended, session: Session) -> dict[str, Any] | None:
    details = dict(end.details or {})
    if session.differences:
        details["done_again_differently"] = session.differences
    return details or None
