"""Where Redis is and how its keys begin, from arguments and the environment."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

from redis.asyncio import BlockingConnectionPool, Redis

from turnmill.connections import mended
from turnmill.errors import UsageError
from turnmill.keys import DEFAULT_NAMESPACE, Keys

SOCKET_SECONDS = 30
"""An answer that takes longer means that the connection is dead. Above every blocking command's wait."""

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

ADHOC = "adhoc"
"""What is asked outside a run is asked in this lane; at a gateway with keys, in one for each key: `adhoc.KEY`."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Farm:
    """One farm: a Redis and a namespace in it.

    `url`: `redis://`, `rediss://` (TLS) or `unix://`, as redis-py reads it.
    """

    url: str
    namespace: str = DEFAULT_NAMESPACE

    @property
    def keys(self) -> Keys:
        return Keys(self.namespace)

    @property
    def address(self) -> str:
        """The URL as it may be shown: without its password."""
        shown = re.sub(r"(?<=://)([^/@:]*):[^/]*@", r"\1:***@", self.url)
        return re.sub(r"([?&]password=)[^&]*", r"\1***", shown)

    @classmethod
    def from_environment(cls, url: str | None = None, namespace: str | None = None) -> Farm:
        """From arguments, else `REDIS_URL` and `TURNMILL_NAMESPACE`. Raises UsageError."""
        url = url or os.environ.get("REDIS_URL")
        if not url:
            raise UsageError("no Redis: set REDIS_URL, for example redis://127.0.0.1:6379")
        namespace = namespace or os.environ.get("TURNMILL_NAMESPACE") or DEFAULT_NAMESPACE
        return cls(url, check_name(namespace, "namespace"))

    def pool(self, connections: int) -> BlockingConnectionPool:
        """A pool of connections to this farm's Redis, made when first used; who finds none free waits.
        Raises UsageError for a URL that is none."""
        options: dict[str, Any] = {"health_check_interval": 30, "socket_timeout": SOCKET_SECONDS}
        if not self.url.startswith("unix:"):
            options |= {"socket_keepalive": True, "socket_connect_timeout": 5}
        try:
            query = parse_qs(urlsplit(self.url).query)
            for option in ("decode_responses", "protocol", "encoding"):
                if option in query:
                    raise ValueError(f"{option} is not to be set")
            pool = BlockingConnectionPool.from_url(
                self.url, max_connections=connections, timeout=None, **options
            )
            pool.connection_class = mended(pool.connection_class)
            pool.make_connection()  # type: ignore[no-untyped-call]  # does not connect, but sees options that are none
            return pool
        except (ValueError, TypeError) as error:
            raise UsageError(f"REDIS_URL {self.address!r}: {error}") from None

    def connect(self) -> Redis:
        """A client of this farm's Redis. Raises UsageError for a URL that is none."""
        return Redis.from_pool(self.pool(connections=16))


def check_name(name: str, what: str) -> str:
    """The name, if it can be part of a key and of a file name. Raises UsageError."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{what} {name!r}: 1 to 100 letters, digits, '.', '_' or '-', beginning with a letter or digit"
        )
    return name


def check_run(name: str) -> str:
    """The name, if a run may have it. Raises UsageError."""
    if is_outside_runs(check_name(name, "run")):
        raise UsageError(f"run {name!r}: names of this form are for turns outside a run")
    return name


def is_outside_runs(run: str) -> bool:
    """Whether this name is for what is asked outside a run."""
    return run == ADHOC or run.startswith(f"{ADHOC}.")


def parse_duration(text: str) -> float:
    """Seconds of `90s`, `30m`, `12h` or `7d`. Raises UsageError."""
    found = re.fullmatch(r"([0-9]{1,6})([smhd])", text)
    if not found or not int(found[1]):
        raise UsageError(f"duration {text!r}: a number above 0 and s, m, h or d, for example 7d")
    return float(int(found[1]) * _SECONDS[found[2]])
