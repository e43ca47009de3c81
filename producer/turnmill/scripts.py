"""Lua scripts, loaded from the files beside the code that calls them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError


@dataclass(frozen=True)
class Script:
    """The text of a script, and the SHA-1 by which Redis knows it."""

    name: str
    text: str

    @cached_property
    def sha(self) -> str:
        return hashlib.sha1(self.text.encode()).hexdigest()


def load_script(name: str, *parts: str, at_full_memory: bool = False) -> Script:
    """One script of several files, each given as `PACKAGE/FILE`, in order. A script that may run
    `at_full_memory` frees memory, or stores what was paid for."""
    text = "\n".join(_read(part) for part in parts)
    shebang = "#!lua flags=allow-oom" if at_full_memory else "#!lua"
    return Script(name, f"{shebang}\n{text}")


def _read(part: str) -> str:
    package, file = part.split("/")
    return files(package).joinpath("lua", file).read_text(encoding="utf-8")


async def call(redis: Redis, script: Script, keys: list[str], args: list[Any]) -> Any:
    """Run a script by its SHA-1; a server that has forgotten it is told again."""
    try:
        return await redis.evalsha(script.sha, len(keys), *keys, *args)  # type: ignore[misc]
    except NoScriptError:
        await redis.script_load(script.text)
        return await redis.evalsha(script.sha, len(keys), *keys, *args)  # type: ignore[misc]


ENQUEUE = load_script("enqueue", "turnmill/common.lua", "turnmill/enqueue.lua")
CANCEL = load_script("cancel", "turnmill/common.lua", "turnmill/cancel.lua", at_full_memory=True)
FORGET = load_script(
    "forget",
    "turnmill/common.lua",
    "turnmill/holds.lua",
    "turnmill/forget.lua",
    at_full_memory=True,
)
SETTLE = load_script("settle", "turnmill/common.lua", "turnmill/settle.lua", at_full_memory=True)
TEND = load_script(
    "tend",
    "turnmill/common.lua",
    "turnmill/holds.lua",
    "turnmill/tend.lua",
    at_full_memory=True,
)
RESTORE = load_script("restore", "turnmill/common.lua", "turnmill/restore.lua")
