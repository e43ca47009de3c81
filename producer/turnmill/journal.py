"""What the effects of a run's conversations were: written down once, told again to the attempts that follow."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic_core import from_json, to_json

from turnmill.client import Client
from turnmill.errors import RecordError
from turnmill.faults import patiently
from turnmill.wire import LARGEST, pack, unpack


class Journal:
    """The journal of one run, in Redis. It waits for a Redis that is away, without end."""

    def __init__(self, client: Client, run: str) -> None:
        self._redis, self._key = client.store.redis, client.farm.keys.journal(run)

    async def get(self, name: str) -> tuple[Any] | None:
        """What was written down, if something was. Raises RecordError if it cannot be read."""
        data: bytes | None = await patiently(
            lambda: self._redis.hget(self._key, name),  # type: ignore[arg-type,return-value]
            patience=None,
            doing="reading the journal",
        )
        if data is None:
            return None
        try:
            return (from_json(unpack(data)),)
        except (RecordError, ValueError) as error:
            raise RecordError(f"the journal's entry {name}: {error}") from None

    async def put(self, name: str, value: Any) -> Any:
        """Write down; returns what will be read again (a tuple comes back as a list). Raises ValueError for what is
        not JSON, or too large."""
        data = _text(value)
        await patiently(
            lambda: self._redis.hset(self._key, name, pack(data)),  # type: ignore[arg-type,return-value]
            patience=None,
            doing="writing the journal",
        )
        return from_json(data)


def is_same(value: Any, written: Any) -> bool:
    """Whether this value would be written down as that one was. Raises ValueError as `put` does."""
    data = _text(value)
    # As text, too: a number that is none equals nothing.
    return from_json(data) == written or data == _text(written)


def _text(value: Any) -> bytes:
    try:
        data = to_json(value)
    except ValueError as error:
        raise ValueError(f"must return JSON: {error}") from None
    if len(data) > LARGEST:
        raise ValueError(f"returned {len(data) >> 20} MB of JSON, and {LARGEST >> 20} is the most")
    return data


def effect_name(conversation: str, epoch: int, item: str, told: str, key: str) -> str:
    """32 hex digits: which effect this is. `item`: its digest. `told`: a digest of all turns and replies before it."""
    parts = json.dumps([conversation, epoch, item, told, key])
    return hashlib.sha256(parts.encode()).hexdigest()[:32]
