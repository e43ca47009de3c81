"""The agent for terminal tasks: one tool, which is bash, in a sandbox. docs/scaffolds.md, section vanillux."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict
from functools import partial
from typing import Annotated, Final, Literal

from pydantic import Field

from turnmill.lines import Loaded
from turnmill.scaffolds.base import Scaffold
from turnmill.scaffolds.vanillux.agent import Rules, drive
from turnmill.scaffolds.vanillux.kinds import Kind, Limits, choose
from turnmill.scaffolds.vanillux.task import Task, read_tasks

_Count = Annotated[int, Field(ge=1)]
_Characters = Annotated[int, Field(ge=100)]  # or the mark of a submission would be cut
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_STARTING: Final = 8
"""Sandboxes that start at once. More would not start sooner, and the last would be taken for dead."""

log = logging.getLogger("turnmill.run")


def vanillux(
    *,
    sandbox: Literal["auto", "docker", "bubblewrap", "local"] = "auto",
    unsafe_local: bool = False,
    image: str = "debian:12",
    steps: _Count = 64,
    command_seconds: _Seconds = 120.0,
    total_seconds: _Seconds = 3600.0,
    observation: _Characters = 10_000,
    format_errors: _Count = 3,
    processes: _Count = 512,
    memory: _Count = 4096,
    space: _Count = 1024,
) -> Scaffold[Task]:
    """The scaffold, with the sandbox that there is. Raises UsageError if there is none.

    `observation`: characters. `memory`, `space`: MiB. What they mean: agent.Rules, kinds.Limits.
    """
    rules = Rules(steps, command_seconds, total_seconds, observation, format_errors)
    limits = Limits(processes, memory, space)
    kind = choose(sandbox, unsafe_local=unsafe_local, limits=limits, image=image)
    options = {"sandbox": kind.name, **asdict(rules), **asdict(limits)}
    if kind.name == "docker":
        options["image"] = image
    starting = asyncio.Semaphore(_STARTING)
    return Scaffold(
        partial(drive, rules=rules, kind=kind, starting=starting),
        partial(_read, kind=kind),
        options,
    )


def _read(source: str, skip_bad: bool, kind: Kind) -> Loaded[Task]:
    loaded = read_tasks(source, skip_bad)
    images = {task.image for task in loaded.items if task.image is not None}
    if images and kind.name != "docker":
        log.warning(
            "tasks name images (%s), which only Docker has: in %s they have this machine's system instead",
            ", ".join(sorted(images)),
            kind.name,
        )
    return loaded
