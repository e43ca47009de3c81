"""Keys of those who ask over HTTP: made once, shown once, and stored as SHA-256.

A key is 256 random bits, so its plain SHA-256 tells nobody how to guess it.
"""

from __future__ import annotations

import hashlib
import secrets
import time

from pydantic import BaseModel, ConfigDict
from redis.asyncio import Redis

from turnmill.errors import UsageError
from turnmill.keys import Keys
from turnmill.settings import check_name

PREFIX = "sk-"
LONGEST_NAME = 60
"""A lane is named after its key, and names of lanes are bounded."""


class ApiKey(BaseModel):
    """What is stored of a key. `models`: those that it may ask for (None: all). `max_queued`: how many of its turns may
    be open at once (None: any number). `created`: Unix time in seconds."""

    model_config = ConfigDict(frozen=True)

    name: str
    models: tuple[str, ...] | None = None
    max_queued: int | None = None
    created: float


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


class ApiKeys:
    """The keys of one namespace. Raises redis-py's errors as they are."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis, self._keys = redis, keys

    async def add(
        self, name: str, models: tuple[str, ...] | None = None, max_queued: int | None = None
    ) -> str:
        """A new key. Raises UsageError for a name that is none, or that is taken."""
        if len(check_name(name, "key")) > LONGEST_NAME:
            raise UsageError(f"key {name!r}: at most {LONGEST_NAME} characters")
        secret = PREFIX + secrets.token_urlsafe(32)
        key = ApiKey(name=name, models=models, max_queued=max_queued, created=time.time())
        record = key.model_dump_json(exclude_none=True)
        async with self._redis.pipeline(transaction=True) as pipe:
            await pipe.watch(self._keys.api_key_names)
            if await pipe.hexists(self._keys.api_key_names, name):  # type: ignore[misc]
                raise UsageError(f"there is a key {name!r}: revoke it first, or take another name")
            pipe.multi()  # type: ignore[no-untyped-call]
            pipe.hset(self._keys.api_key_names, name, digest(secret))
            pipe.hset(self._keys.api_keys, digest(secret), record)
            await pipe.execute()
        return secret

    async def find(self, secret: str) -> ApiKey | None:
        record = await self._redis.hget(self._keys.api_keys, digest(secret))  # type: ignore[misc]
        return None if record is None else ApiKey.model_validate_json(record)

    async def all(self) -> list[ApiKey]:
        """By name."""
        records = await self._redis.hvals(self._keys.api_keys)  # type: ignore[misc]
        found = [ApiKey.model_validate_json(record) for record in records]
        return sorted(found, key=lambda key: key.name)

    async def revoke(self, name: str) -> bool:
        """Returns whether there was such a key."""
        stored = await self._redis.hget(self._keys.api_key_names, name)  # type: ignore[misc]
        if stored is None:
            return False
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hdel(self._keys.api_keys, stored)
            pipe.hdel(self._keys.api_key_names, name)
            await pipe.execute()
        return True
