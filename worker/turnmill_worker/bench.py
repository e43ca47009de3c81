"""The bench: a worker that has crashed three times in ten minutes waits, instead of taking turns down with it.

Workers have a new id at each start, so crashes are counted per station: what is started where. Only crashes of
the worker's own count: no signal from outside, and none while it held suspects, which are to blame then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any, Self

import redis
from redis.exceptions import RedisError

from turnmill.settings import Farm
from turnmill.store import BenchedWorker

log = logging.getLogger("turnmill.worker")

CRASHES = 3
WITHIN = 600
"""Seconds. So many crashes in this time bench a station until the first of them is older."""
LOOK_SECONDS = 1.0
REDIS_SECONDS = 1.0
"""How long one answer of Redis is waited for."""
RECORD_SECONDS = 3.0
"""A worker that has crashed ends after so long at the latest: looking up Redis's machine has no time limit of
its own."""


@dataclass(frozen=True)
class Station:
    """Where a worker runs, and what: the same after each restart. `devices`: CUDA_VISIBLE_DEVICES."""

    host: str
    engine: str
    model: str | None
    devices: str | None

    @classmethod
    def here(cls, engine: str, model: str | None) -> Self:
        return cls(socket.gethostname(), engine, model, os.environ.get("CUDA_VISIBLE_DEVICES"))

    @property
    def name(self) -> str:
        return ":".join((self.host, self.engine, self.devices or "", self.model or ""))


@dataclass(frozen=True)
class _Standing:
    """How a station stands. All times in seconds by Redis's clock; `until` is in the past, or 0, for one that
    may start."""

    now: float
    until: float = 0.0
    why: str = ""

    @property
    def left(self) -> float:
        return self.until - self.now


class Bench:
    """The crashes of one station. Redis may be away: then none are recorded, and nobody waits."""

    def __init__(self, farm: Farm, station: Station) -> None:
        self._farm, self._station = farm, station
        self._key = farm.keys.crashes(station.name)

    def record(self, why: str) -> None:
        """Note a crash of this station. Returns within seconds, and raises nothing."""
        thread = threading.Thread(target=self._record, args=[why], daemon=True)
        thread.start()
        thread.join(RECORD_SECONDS)

    def _record(self, why: str) -> None:
        one_line = " ".join(why.split())[:500]
        try:
            with self._connection() as connection:
                pipe = connection.pipeline(transaction=False)
                # The id of an entry is the time, by Redis's clock.
                pipe.xadd(self._key, {"why": one_line}, maxlen=CRASHES, approximate=False)
                pipe.expire(self._key, WITHIN)
                pipe.execute()
        except (RedisError, OSError) as error:
            log.warning("the crash could not be recorded: %s", error)

    def wait(self) -> None:
        """Return when this station may start, which is at once unless it has crashed too often. Exits with 0
        when told to end meanwhile."""
        try:
            with self._connection() as connection:
                standing = self._standing(connection)
                if standing.left > 0:
                    log.warning(
                        "benched: %d crashes within %d minutes, the last one: %s. The model is loaded in %.0f s, or "
                        "when the key %s is deleted",
                        CRASHES,
                        WITHIN // 60,
                        standing.why,
                        standing.left,
                        self._key,
                    )
                    with _ending_on_signals(), self._visible(connection):
                        self._sit_out(connection, standing)
                    log.warning("off the bench")
        except (RedisError, OSError) as error:
            log.debug(
                "whether this worker is benched cannot be seen: %s", error
            )  # it will wait for Redis, and say so

    def _sit_out(self, connection: redis.Redis, standing: _Standing) -> None:
        end = time.monotonic() + standing.left
        while time.monotonic() < end:
            # Redis may be away for a while meanwhile: what was known then still holds.
            with contextlib.suppress(RedisError, OSError):
                self._say(connection, standing)
                standing = self._standing(connection)
                end = time.monotonic() + standing.left
            time.sleep(max(0.0, min(LOOK_SECONDS, end - time.monotonic())))

    def _standing(self, connection: redis.Redis) -> _Standing:
        pipe = connection.pipeline(transaction=False)
        pipe.time()
        pipe.xrevrange(self._key, count=CRASHES)
        (seconds, micros), crashes = pipe.execute()
        now = seconds + micros / 1e6
        if len(crashes) < CRASHES:
            return _Standing(now)
        (_, last), (first, _) = crashes[0], crashes[-1]
        since = int(first.partition(b"-")[0]) / 1000
        return _Standing(now, since + WITHIN, last[b"why"].decode(errors="replace"))

    # For `turnmill status`

    @property
    def _me(self) -> str:
        return f"{self._station.host}:{os.getpid()}"

    @contextlib.contextmanager
    def _visible(self, connection: redis.Redis) -> Iterator[None]:
        try:
            yield
        finally:
            with contextlib.suppress(RedisError, OSError):
                connection.hdel(self._farm.keys.benched, self._me)

    def _say(self, connection: redis.Redis, standing: _Standing) -> None:
        me = BenchedWorker(
            pid=os.getpid(),
            why=standing.why,
            until=standing.until,
            heartbeat=standing.now,
            **asdict(self._station),
        )
        pipe = connection.pipeline(transaction=False)
        pipe.hset(self._farm.keys.benched, self._me, me.model_dump_json())
        pipe.expire(self._farm.keys.benched, WITHIN)
        pipe.execute()

    def _connection(self) -> redis.Redis:
        return redis.Redis.from_url(
            self._farm.url, socket_timeout=REDIS_SECONDS, socket_connect_timeout=REDIS_SECONDS
        )


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Inside the block SIGTERM and SIGINT end the process with 0: it holds nothing yet."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(0)

    before: dict[signal.Signals, Any] = {
        number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
