"""A scaffold for tests: asks, throws dice, writes into a folder, which is its sandbox."""

from __future__ import annotations

import asyncio
import os
import random
from functools import partial
from pathlib import Path

from turnmill import Message
from turnmill.scaffolds import Ask, Ended, Line, Scaffold


def dicing(*, sandbox: str, log: str, steps: int = 4, pause: float = 0.0) -> Scaffold[Line]:
    async def throw(path: Path, step: int) -> int:
        _append(Path(log), f"{path.name} {step}")
        await asyncio.sleep(pause)
        return random.randint(1, 1_000_000)

    async def append(path: Path, text: str) -> str:
        return _append(path, text + os.environ.get("STAMP", ""))

    async def drive(item: Line, ask: Ask) -> Ended:
        path = Path(sandbox) / item.id
        _clear(path)  # the sandbox of an earlier attempt
        messages = [Message(role="user", content=f"item {item.id}")]
        seen: list[str] = []
        for step in range(steps):
            reply = await ask(messages)
            number = await ask.effect("dice", partial(throw, path, step))
            text = f"{step}: {number}"
            seen.append(await ask.effect("append", partial(append, path, text), rebuild=True))
            messages += [reply.message, Message(role="user", content=text)]
        if item.fields.get("breaks"):
            raise RuntimeError("broken on purpose")
        if item.fields.get("fails"):
            return Ended(messages, failed="as it was told to")
        return Ended(messages, ending="thrown", score=len(seen) / 10, details={"seen": seen})

    return Scaffold(drive)


def _clear(path: Path) -> None:
    path.unlink(missing_ok=True)


def _append(path: Path, text: str) -> str:
    with open(path, "a") as file:
        file.write(text + "\n")
    return path.read_text()
