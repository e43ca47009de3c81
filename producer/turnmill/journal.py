"""What the effects of a run's conversations were: written down once, told again to the attempts that follow."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic_core import PydanticSerializationError, from_json, to_json

from turnmill.client import Client
from turnmill.errors import RecordError
from turnmill.faults import patiently
from turnmill.turn import Message
from turnmill.wire import pack, unpack


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
        except ValueError as error:
            raise RecordError(f"the journal's entry {name}: {error}") from None

    async def put(self, name: str, value: Any) -> Any:
        """Write down; returns what will be read again (a tuple comes back as a list). Raises ValueError for what is
        not JSON."""
        try:
            data = to_json(value)
        except PydanticSerializationError as error:
            raise ValueError(f"an effect must return JSON: {error}") from None
        await patiently(
            lambda: self._redis.hset(self._key, name, pack(data)),  # type: ignore[arg-type,return-value]
            patience=None,
            doing="writing the journal",
        )
        return from_json(data)


def effect_name(conversation: str, epoch: int, turn: str, said: Message | None, key: str) -> str:
    """32 hex digits: which effect this is. `turn`: the hash of the turn before it, which knows all that was said before.
    `said`: its answer, if it had one, for a turn can be asked anew and be answered otherwise."""
    answer = "" if said is None else to_json(said, exclude_none=True).decode()
    parts = json.dumps([conversation, epoch, turn, answer, key])
    return hashlib.sha256(parts.encode()).hexdigest()[:32]
