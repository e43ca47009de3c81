"""Holding turns: renewing their leases, and saying that this worker lives.

In a thread with its own connection, so that neither a busy event loop nor a slow command on the main
connection lets leases lapse.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import redis
from redis.exceptions import NoScriptError, RedisError

from turnmill.scripts import Script
from turnmill.settings import Farm
from turnmill.store import WorkerInfo
from turnmill_worker.counters import Counters
from turnmill_worker.scripts import REGISTER, RENEW

log = logging.getLogger("turnmill.worker")

RENEW_CHUNK = 500
UPKEEP_CALLS = 50
"""RENEW calls in a row, at most, while there is upkeep to do."""

LONGEST_STEP = 0.5
"""Seconds. Below a quarter of the lease, because here a worker hears that nobody wants a turn any more."""

QUICK_TRIES = 20
QUICK_BACK_OFF = 0.05
"""Seconds. A connection that was cut is made anew at once; only a Redis that stays away is left alone for a step."""

Held = list[tuple[str, str]]
"""Turns by hash, each with the token of its claim: the same turn may be claimed again by the same worker."""

Renewed = Callable[[Held, Held], None]
"""Called in the keeper's thread with the claims that are lost, and those of turns that nobody wants."""

Streamed = Callable[[list[str]], None]
"""Called in the keeper's thread with the hashes of turns that somebody reads along, since lately; again and again."""


class LeaseKeeper(threading.Thread):
    """Renews what `held` returns (hash, token) every quarter of a lease, and at least twice a second.

    `alive`: asked before each renewal; a worker whose engine is dead lets its leases lapse.
    """

    def __init__(
        self,
        farm: Farm,
        model: str,
        lease: float,
        *,
        held: Callable[[], Held],
        info: Callable[[], WorkerInfo],
        alive: Callable[[], bool],
        renewed: Renewed,
        streamed: Streamed = lambda hashes: None,
        counters: Counters | None = None,
    ) -> None:
        super().__init__(name="turnmill-leases", daemon=True)
        self._farm, self._model, self._step = farm, model, min(lease / 4, LONGEST_STEP)
        self._held, self._info, self._alive, self._renewed = held, info, alive, renewed
        self._streamed = streamed
        self._counters = counters or Counters()
        self._lease_ms = int(lease * 1000)
        self._expiry_ms = int(max(3 * lease, 5) * 1000)
        self._over = threading.Event()
        timeout = max(self._step, 0.5)
        self._redis = redis.Redis.from_url(
            farm.url, socket_timeout=timeout, socket_connect_timeout=timeout
        )

    def run(self) -> None:
        failed = 0  # in a row
        while True:
            try:
                self._beat()
                if failed:
                    log.warning("Redis is back; leases are renewed again")
                failed, self._counters.registered = 0, True
            except (RedisError, OSError) as error:
                if not failed:
                    log.warning("leases cannot be renewed now: %s", error)
                failed += 1
                self._counters.registered = False
            except Exception:
                log.exception("renewing leases")
            quick = 0 < failed <= QUICK_TRIES
            if self._over.wait(min(QUICK_BACK_OFF, self._step) if quick else self._step):
                break
        self._sign_off()

    def stop(self) -> None:
        self._over.set()

    def _beat(self) -> None:
        self._register()
        if not self._alive():
            return
        held = self._held()
        for start in range(0, max(1, len(held)), RENEW_CHUNK):
            self._renew(held[start : start + RENEW_CHUNK])

    def _renew(self, held: Held) -> None:
        lost, unwanted, again, streamed = self._call(
            RENEW, [part for pair in held for part in pair]
        )
        self._counters.renewed += len(held) - len(lost)
        if lost or unwanted:
            token_of = dict(held)
            self._renewed(
                [(hash, token_of[hash]) for hash in map(bytes.decode, lost)],
                [(hash, token_of[hash]) for hash in map(bytes.decode, unwanted)],
            )
        if streamed:
            self._streamed([hash.decode() for hash in streamed])
        for _ in range(UPKEEP_CALLS):
            if not again:
                break
            _, _, again, _ = self._call(RENEW, [])

    def _call(self, script: Script, args: list[Any]) -> Any:
        keys = [self._farm.keys.prefix, self._farm.keys.queue(self._model)]
        try:
            return self._redis.evalsha(script.sha, 2, *keys, *args)
        except NoScriptError:
            self._redis.script_load(script.text)
            return self._redis.evalsha(script.sha, 2, *keys, *args)

    def _register(self) -> None:
        """Again and again: a Redis that came back empty has forgotten it."""
        info = self._info()
        self._call(REGISTER, [self._lease_ms, info.id, info.model_dump_json(), self._expiry_ms])

    def _sign_off(self) -> None:
        info, keys = self._info(), self._farm.keys
        try:
            pipe = self._redis.pipeline(transaction=False)
            pipe.srem(keys.workers, info.id)
            pipe.delete(keys.worker(info.id))
            pipe.execute()
            self._redis.close()
        except (RedisError, OSError):
            log.debug("could not sign off; the record expires by itself")
