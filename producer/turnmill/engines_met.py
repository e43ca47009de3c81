"""Which engines a run has met: its answers are of one experiment only if that is one."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from pydantic import ValidationError
from pydantic_core import from_json
from redis.asyncio import Redis

from turnmill.errors import EngineChanged, RecordError
from turnmill.faults import patiently
from turnmill.keys import Keys
from turnmill.reply import EngineIdentity
from turnmill.turn import explain

log = logging.getLogger("turnmill.run")


class EnginesMet:
    """The identities of the engines of live workers that served a run's model while it was driven, as Redis remembers
    them. It waits for a Redis that is away, without end."""

    def __init__(self, redis: Redis, keys: Keys, run: str) -> None:
        self._redis, self._key, self._run = redis, keys.engines(run), run
        self._known: set[EngineIdentity] = set()

    async def read(self) -> None:
        """What earlier attempts have met."""
        records = await patiently(
            lambda: self._redis.smembers(self._key),  # type: ignore[arg-type,return-value]
            patience=None,
            doing="reading which engines the run has met",
        )
        try:
            self._known = {EngineIdentity.model_validate(from_json(data)) for data in records}
        except ValueError as error:
            what = explain(error) if isinstance(error, ValidationError) else str(error)
            raise RecordError(
                f"run {self._run!r}: an engine that it has met cannot be read: {what}"
            ) from None

    def changed(self, live: Iterable[EngineIdentity]) -> EngineChanged | None:
        """What is wrong with going on with these engines, if the run has met others and not all of these."""
        new = sorted(map(str, set(live) - self._known))
        if not new or not self._known:
            return None
        before = "; ".join(sorted(map(str, self._known)))
        return EngineChanged(
            f"run {self._run!r} has met the engine {before}, and now there is {'; '.join(new)}: "
            "stop that worker, choose another --run, or take both with --allow-mixed"
        )

    async def meet(self, live: Iterable[EngineIdentity]) -> None:
        """Remember these. A new one beside others is warned about."""
        new = set(live) - self._known
        if not new:
            return
        if len(known := self._known | new) > 1:
            log.warning(
                "MIXED ENGINES: the answers of run %s are from more than one: %s",
                self._run,
                "; ".join(sorted(map(str, known))),
            )
        await patiently(
            lambda: self._redis.sadd(self._key, *(engine.model_dump_json() for engine in new)),  # type: ignore[arg-type,return-value]
            patience=None,
            doing="remembering which engines the run has met",
        )
        self._known = known
