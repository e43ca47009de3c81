"""Who asks, and whose runs are whose."""

from __future__ import annotations

import hmac
import re
import time
from dataclasses import dataclass

from redis.asyncio import Redis

from turnmill.api_keys import ApiKey, ApiKeys
from turnmill.errors import UsageError
from turnmill.gateway.errors import ApiError, refused
from turnmill.gateway.settings import GatewaySettings
from turnmill.settings import ADHOC, check_name, check_run

KNOWN_SECONDS = 5.0
"""For how long a key that was found is not looked up again: so long a revoked one may still ask."""
LOOKUPS = 10_000

_BEARER = re.compile(r"bearer\s+(\S+)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Asker:
    """Who asks. `key`: None where nobody is asked for one. `run`, `attempt`: None outside. `idempotency`: the client's
    own name of this request. `again`: it has asked before, and not heard the answer."""

    key: ApiKey | None = None
    run: str | None = None
    attempt: str | None = None
    idempotency: str | None = None
    again: bool = False

    @property
    def lane(self) -> str:
        """The run that its turns are asked for."""
        if self.run:
            return self.run
        return f"{ADHOC}.{self.key.name}" if self.key else ADHOC

    @property
    def scope(self) -> str:
        """Within which its draws are told apart."""
        return f"{self.run}:{self.attempt}" if self.run and self.attempt else f"{self.lane}:"


class Access:
    """Finds who asks. Raises ApiError, and redis-py's errors as they are."""

    def __init__(self, redis: Redis, settings: GatewaySettings) -> None:
        self._redis, self._settings = redis, settings
        self._keys = settings.farm.keys
        self._api_keys = ApiKeys(redis, self._keys)
        self._found: dict[str, tuple[float, ApiKey]] = {}
        self._owned: set[tuple[str, str]] = set()

    async def key_of(self, authorization: str | None) -> ApiKey | None:
        """The key of a request; None where none is needed."""
        if self._settings.insecure:
            return None
        bearer = _BEARER.fullmatch(authorization or "")
        if bearer is None:
            raise ApiError(
                401, "no API key: send `Authorization: Bearer sk-...`", code="no_api_key"
            )
        if self._settings.secret is not None:
            if hmac.compare_digest(bearer[1].encode(), self._settings.secret.encode()):
                return None
        elif key := await self._find(bearer[1]):
            return key
        raise ApiError(401, "this API key is not known here", code="invalid_api_key")

    async def _find(self, secret: str) -> ApiKey | None:
        now = time.monotonic()
        if (known := self._found.get(secret)) and now - known[0] < KNOWN_SECONDS:
            return known[1]
        self._found.pop(secret, None)
        key = await self._api_keys.find(secret)
        if key is not None:
            if len(self._found) >= LOOKUPS:
                self._found.clear()
            self._found[secret] = now, key
        return key

    async def enter(self, key: ApiKey | None, run: str | None, attempt: str | None) -> None:
        """See that the key may ask in this run."""
        try:
            if run is not None:
                check_run(run)
            if attempt is not None:
                check_name(attempt, "attempt")
        except UsageError as error:
            raise refused(None, str(error), "bad_name") from None
        if run is None and attempt is not None:
            raise refused(None, f"attempt {attempt!r} of no run", "bad_name")
        if key is not None and run is not None:
            owner = await self._redis.hget(self._keys.run(run), "owner")  # type: ignore[misc]
            _check_owner(run, owner, key)

    async def own(self, asker: Asker) -> None:
        """The asker's key asks for turns in this lane. A run is the first one's who does."""
        key, lane = asker.key, asker.lane
        if key is None or (key.name, lane) in self._owned:
            return
        if asker.run is not None:
            where = self._keys.run(asker.run)
            await self._redis.hsetnx(where, "owner", key.name)  # type: ignore[misc]
            _check_owner(asker.run, await self._redis.hget(where, "owner"), key)  # type: ignore[misc]
        await self._redis.sadd(self._keys.runs_of(key.name), lane)  # type: ignore[misc]
        if asker.run is None:  # a run may be forgotten, and be somebody else's then
            self._owned.add((key.name, lane))


def _check_owner(run: str, owner: bytes | None, key: ApiKey) -> None:
    if owner is not None and owner.decode() != key.name:
        raise ApiError(403, f"run {run!r} belongs to another key", code="not_your_run")
