"""A run: many conversations through the queue, resumable by asking again.

Nothing of a run's progress is kept but what the queue keeps: replies by request hash. Run again from the
start, each conversation is answered from the store up to its first unanswered turn.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from turnmill.budget import FailureBudget
from turnmill.client import Client
from turnmill.conversations import Conversation
from turnmill.draws import Draws
from turnmill.errors import ManifestChanged, RecordError, TurnFailed, UsageError
from turnmill.faults import patiently
from turnmill.output import RunFiles
from turnmill.ownership import sole_producer
from turnmill.reply import Reply
from turnmill.results import ConversationResult, Outcome, Report, TurnResult
from turnmill.scaffolds.base import Scaffold
from turnmill.tasks import end_tasks
from turnmill.turn import Message, Sampling, Tool, Turn

log = logging.getLogger("turnmill.run")

REFRESH_SECONDS = 2.0
FEWEST_AT_ONCE = 32
PER_SLOT = 2
"""Conversations at once for each slot of the live workers, so that a freed slot finds a turn waiting."""


@dataclass(frozen=True)
class RunSettings:
    """What a run is, beside its conversations.

    `sampling` is under each conversation's own. `seed`: makes every draw repeatable. `concurrency`:
    conversations at once (None: from the slots of the workers that live). `extend`: take another manifest.
    """

    name: str
    model: str
    scaffold: str = "multi_turn_chat"
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None
    concurrency: int | None = None
    max_failures: FailureBudget = field(default_factory=lambda: FailureBudget.parse("5%"))
    retry_failed: bool = False
    extend: bool = False


@dataclass
class Progress:
    """Where a run is, now. Turns: `asked` went into the queue, `stored` were answered before."""

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
    `unfinished`: conversations that have not ended. `tokens_made`: completion tokens of this attempt."""

    report: Report
    budget_spent: bool
    unfinished: int
    tokens_made: int


class _Stopped(Exception):
    """The run stops enqueuing; the conversation stays where it is and goes on in the next attempt."""


class Run:
    """One attempt at a run. `drive` may be called once."""

    def __init__(
        self,
        settings: RunSettings,
        conversations: Sequence[Conversation],
        scaffold: Scaffold,
        client: Client,
        files: RunFiles,
    ) -> None:
        self.settings, self._conversations, self._scaffold = settings, conversations, scaffold
        self._client, self._files = client, files
        self.progress = Progress(total=len(conversations))
        self._results: dict[str, ConversationResult] = {}
        self._stopping = False
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
            driver = asyncio.create_task(self._drive_all())
            either: list[asyncio.Future[Any]] = [driver, usurped]
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if usurped.done():
                    usurped.result()  # another producer's answers would be mixed with ours
                return await driver
            finally:
                await end_tasks([driver])

    async def _drive_all(self) -> RunEnd:
        waiting = iter(self._conversations)
        ended: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()
        tasks: set[asyncio.Task[None]] = set()
        refresher = asyncio.create_task(self._follow_workers())
        try:
            while True:
                while len(tasks) < self._at_once() and not self._stopping:
                    conversation = next(waiting, None)
                    if conversation is None:
                        break
                    task = asyncio.create_task(self._converse(conversation))
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
        return await self._finish()

    async def _finish(self) -> RunEnd:
        ordered = [self._results[c.id] for c in self._conversations if c.id in self._results]
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
        unfinished = len(self._conversations) - len(ordered)
        if unfinished:
            self._files.write_report(report)
        else:
            self._files.finish(ordered, report)
        failed = report.outcomes.failed
        spent = self._stopping or self.settings.max_failures.spent(failed, len(ordered))
        return RunEnd(report, spent, unfinished, self.progress.tokens)

    # One conversation

    async def _converse(self, conversation: Conversation) -> None:
        session = _Session(self, conversation)
        outcome: Outcome = "completed"
        error: str | None = None
        capped = None
        try:
            end = await self._scaffold(conversation, session.ask)
            messages, capped = list(end.messages), end.capped
            outcome = "capped" if capped else "completed"
        except _Stopped:
            return
        except TurnFailed as failed:
            messages, error = session.messages, str(failed)
            self._failed_now += not session.from_store
            outcome = "cancelled" if failed.failure.kind == "cancelled" else "failed"
        except RecordError as unreadable:  # as it was before this attempt
            messages, error, outcome = session.messages, str(unreadable), "failed"
        except (UsageError, ValueError) as wrong:
            messages, error, outcome = session.messages, str(wrong), "failed"
            self._failed_now += 1
        if capped is None and any(turn.capped == "output" for turn in session.turns):
            capped = "output"
        self._ended(
            ConversationResult(
                id=conversation.id,
                outcome=outcome,
                capped=capped,
                messages=messages,
                turns=session.turns,
                error=error,
            )
        )

    def _ended(self, result: ConversationResult) -> None:
        self._files.append(result)
        self._results[result.id] = result
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

    async def answer(self, turn: Turn, session: _Session) -> Reply:
        """The reply to the next turn of a conversation. Raises TurnFailed."""
        if self._stopping:
            raise _Stopped
        state, ending = await self._client.ask_stating(
            turn, going=bool(session.turns), retry_failed=self.settings.retry_failed
        )
        session.from_store = state in ("answered", "failed")
        if session.from_store:
            self.progress.stored += 1
        else:
            self.progress.asked += 1
        if not isinstance(ending, Reply):
            raise TurnFailed(ending)
        if not session.from_store:
            self.progress.tokens += ending.usage.completion_tokens
        return ending

    # How many at once

    def _at_once(self) -> int:
        return self.settings.concurrency or max(FEWEST_AT_ONCE, PER_SLOT * self.progress.slots)

    async def _follow_workers(self) -> None:
        warned = False
        while True:
            workers = await patiently(
                self._client.store.workers, patience=None, doing="reading which workers live"
            )
            mine = [worker for worker in workers if worker.model == self.settings.model]
            self.progress.workers = len(mine)
            self.progress.slots = sum(worker.slots for worker in mine)
            if not mine and not warned and self.progress.asked + self.progress.stored == 0:
                log.warning("no live worker serves %s; waiting for one", self.settings.model)
            warned = not mine
            await asyncio.sleep(REFRESH_SECONDS)

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
            "seed": self.settings.seed,
            "conversations": {
                "count": len(self._conversations),
                "digest": _digest(c.digest for c in self._conversations),
            },
        }


class _Session:
    """What a run remembers of one conversation while a scaffold drives it. `from_store`: its last turn had
    ended before it was asked."""

    def __init__(self, run: Run, conversation: Conversation) -> None:
        self._run = run
        self._draws = Draws(run.settings.name, conversation.id, 0, run.settings.seed)
        self.turns: list[TurnResult] = []
        self.messages: list[Message] = []
        self.from_store = False

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        sampling: Sampling | None = None,
        tools: Sequence[Tool] | None = None,
        tool_choice: Any = None,
        response_format: dict[str, Any] | None = None,
    ) -> Reply:
        settings = self._run.settings
        own = sampling.model_dump(exclude_none=True) if sampling else {}
        turn = self._draws.numbered(
            Turn(
                model=settings.model,
                messages=list(messages),
                tools=list(tools) if tools else None,
                tool_choice=tool_choice,
                response_format=response_format,
                sampling=settings.sampling.model_copy(update=own),
            )
        )
        self.messages = list(messages)
        try:
            reply = await self._run.answer(turn, self)
        except TurnFailed as failed:
            result = TurnResult(hash=turn.hash, sample=turn.sample, failure=failed.failure)
            self.turns.append(result)
            raise
        self.messages.append(reply.message)
        self.turns.append(
            TurnResult(
                hash=turn.hash,
                sample=turn.sample,
                finish_reason=reply.finish_reason,
                capped=reply.capped,
                usage=reply.usage,
            )
        )
        return reply


def _digest(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode())
    return digest.hexdigest()
