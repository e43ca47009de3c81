"""Why two turns are not one: where the bodies differ that their hashes stand for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from pydantic_core import from_json

from turnmill.errors import BadInput, BadTurn, RecordError, UsageError
from turnmill.output import PARTIAL, REPLIES, read_results
from turnmill.results import ConversationResult
from turnmill.settings import check_name
from turnmill.store import Store

NOT_HASHED: Final = ("run", "priority", "weight", "deadline", "engine", "worker", "trace")
"""What two asks of one turn may differ in: docs/hash.md says why."""
_HEX: Final = frozenset("0123456789abcdef")


class Absent(Enum):
    """One of the two has nothing there."""

    ABSENT = "absent"


ABSENT: Final = Absent.ABSENT


@dataclass(frozen=True)
class Difference:
    """`path`: like `messages[1].content`. `left`, `right`: JSON values, or ABSENT."""

    path: str
    left: Any
    right: Any


def differences(left: Any, right: Any, path: str = "") -> Iterator[Difference]:
    """Where two JSON values differ, each place as deep down as it can be named."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted({*left, *right}):
            one, other = left.get(key, ABSENT), right.get(key, ABSENT)
            yield from differences(one, other, _below(path, key))
    elif isinstance(left, list) and isinstance(right, list):
        for i in range(max(len(left), len(right))):
            one = left[i] if i < len(left) else ABSENT
            other = right[i] if i < len(right) else ABSENT
            yield from differences(one, other, f"{path}[{i}]")
    elif isinstance(left, bool) != isinstance(right, bool) or left != right:  # True is 1 to Python
        yield Difference(path, left, right)


def _below(path: str, key: str) -> str:
    if not key.isidentifier():
        return f"{path}[{json.dumps(key, ensure_ascii=False)}]"
    return f"{path}.{key}" if path else key


async def hashed_fields(store: Store, hash: str) -> dict[str, Any]:
    """What identifies a stored turn. Raises UsageError if there is none that can be read."""
    try:
        turn = await store.turn(hash)
    except (RecordError, BadTurn) as error:
        raise UsageError(f"turn {hash}: what is stored of it cannot be read: {error}") from None
    if turn is None:
        raise UsageError(
            f"turn {hash}: nothing is stored of it. It was never asked here, or was cancelled or forgotten"
        )
    if turn.hash != hash:
        raise UsageError(f"turn {hash}: the body that is stored under it is that of {turn.hash}")
    fields: dict[str, Any] = from_json(turn.canonical.stored)
    return fields


def find_hash(name: str, runs: Path) -> str:
    """The hash that a turn is named by: itself, or RUN/CONVERSATION/TURN of a folder of runs. TURN counts from 0;
    CONVERSATION is an id, or ID@EPOCH. Raises UsageError."""
    if len(name) == 64 and set(name) <= _HEX:
        return name
    run, _, rest = name.partition("/")
    conversation, _, index = rest.rpartition("/")
    if not (conversation and index.isascii() and index.isdecimal()):
        raise UsageError(
            f"turn {name!r}: give a whole hash (64 hex digits), or RUN/CONVERSATION/TURN, for example demo/ferry/0"
        )
    result = _find_conversation(runs / check_name(run, "run"), conversation)
    if int(index) >= len(result.turns):
        raise UsageError(f"turn {name!r}: the conversation has {len(result.turns)} turns, from 0")
    return result.turns[int(index)].hash


def _find_conversation(folder: Path, name: str) -> ConversationResult:
    files = [folder / file for file in (REPLIES, PARTIAL) if (folder / file).exists()]
    if not files:
        raise BadInput(str(folder), 0, "there are no replies in it")
    results = {result.key: result for file in files for result in read_results(file)}
    id, _, epoch = name.rpartition("@")
    found = results.get((name, 0))
    if found is None and epoch.isascii() and epoch.isdecimal():
        found = results.get((id, int(epoch)))
    if found is None:
        raise BadInput(str(folder), 0, f"no conversation {name!r} has ended")
    return found
