"""The agent: asks, runs what is called for, tells what came of it, until an end."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from turnmill.results import ConversationCap
from turnmill.scaffolds.base import Ask, Ended
from turnmill.scaffolds.vanillux import prompts
from turnmill.scaffolds.vanillux.calls import Call, understand
from turnmill.scaffolds.vanillux.kinds import Kind
from turnmill.scaffolds.vanillux.packing import pack
from turnmill.scaffolds.vanillux.sandbox import Ran, Sandbox, SandboxDied
from turnmill.scaffolds.vanillux.task import Task

Ending = Literal["submitted", "context_overflow", "max_steps", "timeout", "format_errors", "error"]

_CAPS: Final[dict[Ending, ConversationCap]] = {
    "context_overflow": "context",
    "max_steps": "turns",
    "timeout": "time",
}


@dataclass(frozen=True)
class Rules:
    """`steps`: answers. `command_seconds`: of one command; `total_seconds`: of all of them. `observation`: characters
    of a command's output. `format_errors`: answers in a row that call for nothing that can be run."""

    steps: int = 64
    command_seconds: float = 120.0
    total_seconds: float = 3600.0
    observation: int = 10_000
    format_errors: int = 3


async def drive(
    task: Task, ask: Ask, rules: Rules, kind: Kind, starting: asyncio.Semaphore
) -> Ended:
    """One conversation about a task, in a sandbox of its own, and its score. `starting` bounds the sandboxes that start at once."""
    ending: Ending
    score: float | None = None
    failed: str | None = None
    async with Sandbox(
        lambda: kind.launch(task.image), lambda: pack(task.files), starting
    ) as sandbox:
        work = _Work(task, ask, rules, sandbox)
        try:
            ending = await work.go()
            score = await work.check()
        except SandboxDied as died:
            ending, failed = "error", str(died)
    details = {
        "steps": work.steps,
        "commands": work.commands,
        "command_seconds": round(work.seconds, 3),
        "check": work.checked,
    }
    capped = _CAPS.get(ending)
    return Ended(work.messages, capped, ending=ending, score=score, details=details, failed=failed)


class _Work:
    def __init__(self, task: Task, ask: Ask, rules: Rules, sandbox: Sandbox) -> None:
        self._task, self._ask, self._rules, self._sandbox = task, ask, rules, sandbox
        self.messages = prompts.opening(
            task.prompt,
            seconds=rules.command_seconds,
            most=rules.observation,
            steps=rules.steps,
        )
        self.steps = self.commands = 0
        self.checked: Ran | None = None
        self.seconds = 0.0
        """That commands have taken, in all attempts together. Turns do not count: how long one waits is the farm's affair."""

    async def go(self) -> Ending:
        wrong_in_a_row = 0
        for _ in range(self._rules.steps):
            reply = await self._ask(self.messages, tools=[prompts.BASH])
            self.steps += 1
            message, calls = understand(reply.message)
            self.messages.append(message)
            if reply.capped == "context":
                return "context_overflow"
            if not calls:
                self.messages.append(prompts.no_call(cut=reply.capped == "output"))
            ran = [call for call in calls if call.wrong is None]
            if await self._answer(calls):
                return "submitted"
            wrong_in_a_row = 0 if ran else wrong_in_a_row + 1
            if wrong_in_a_row >= self._rules.format_errors:
                return "format_errors"
            if self._time_is_up:
                return "timeout"
        return "max_steps"

    async def _answer(self, calls: list[Call]) -> bool:
        """Run what was called for, one after the other, while there is time. Whether it was submitted."""
        for number, call in enumerate(calls):
            if call.wrong is not None:
                self.messages.append(prompts.result(call.id, call.wrong))
                continue
            key = f"answer {self.steps}, command {number + 1}"
            took: list[float] = []
            do = partial(self._timed, took, call.command)
            ran = await self._ask.effect(key, do, rebuild=True)
            self.seconds += await self._ask.effect(f"{key}, seconds", partial(_sum, took))
            self.commands += 1
            text = prompts.observed(ran, self._rules.command_seconds)
            self.messages.append(prompts.result(call.id, text))
            if prompts.is_submission(ran):
                return True
            if self._time_is_up:
                return False
        return False

    @property
    def _time_is_up(self) -> bool:
        return self.seconds > self._rules.total_seconds

    async def _timed(self, took: list[float], command: str) -> Ran:
        await self._sandbox.ready()  # how long this takes is not the command's affair
        begun = time.monotonic()
        ran = await self._sandbox.run(
            command, seconds=self._rules.command_seconds, most=self._rules.observation
        )
        took.append(time.monotonic() - begun)
        return ran

    async def check(self) -> float | None:
        """The score; None without a check. It runs in the same sandbox, but in a shell of its own: in the folder of the task, with
        nothing exported."""
        if self._task.check is None:
            return None
        self.checked = ran = await self._ask.effect("check", self._check)
        return float(ran["exit"] == 0 and not ran["killed"])

    async def _check(self) -> Ran:
        assert self._task.check is not None
        if self._task.check_files is not None:
            files = await asyncio.to_thread(pack, self._task.check_files)
            unpacked = await self._sandbox.put(files)
            if unpacked["exit"]:  # by what the model has left there: a full folder, say
                return unpacked
        return await self._sandbox.run(
            self._task.check,
            seconds=self._task.check_seconds,
            most=self._rules.observation,
            # A name that no command could know before: nothing lies in wait for it.
            shell=f"check-{secrets.token_hex(8)}",
        )


async def _sum(took: list[float]) -> float:
    return round(sum(took), 3)
