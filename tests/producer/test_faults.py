"""Which errors pass by themselves, and waiting for it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import redis.exceptions as errors
from redis.asyncio import Redis
from tests.processes import ValkeyServer

from turnmill.errors import QueueFull, RedisAway, RedisUnusable
from turnmill.faults import passes, patiently

FULL = errors.ResponseError("TURNMILLFULL Redis memory: what is queued would pass 85% of maxmemory")


@pytest.mark.parametrize(
    "error",
    [
        errors.ConnectionError("Connection refused"),
        errors.TimeoutError("Timeout reading from socket"),
        errors.BusyLoadingError("Redis is loading the dataset in memory"),
        errors.ReadOnlyError("You can't write against a read only replica."),
        errors.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
        errors.NoScriptError("No matching script."),
        errors.ResponseError("MISCONF Errors writing to the AOF file: No space left on device"),
        errors.ResponseError("MASTERDOWN Link with MASTER is down"),
        errors.ResponseError("NOREPLICAS Not enough good replicas to write."),
        errors.ResponseError("BUSY Redis is busy running a script."),
        ConnectionResetError(),
        TimeoutError(),
    ],
    ids=repr,
)
def test_these_pass(error: Exception) -> None:
    assert passes(error)


@pytest.mark.parametrize(
    "error",
    [
        errors.AuthenticationError("invalid username-password pair"),
        errors.AuthorizationError("not allowed"),
        errors.NoPermissionError("this user has no permissions to run the 'evalsha' command"),
        errors.ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"),
        errors.ResponseError("unknown command 'XADD'"),
        ValueError("our own"),
    ],
    ids=repr,
)
def test_these_do_not(error: Exception) -> None:
    assert not passes(error)


class Attempts:
    """Fails with these errors, one after the other; then it is done."""

    def __init__(self, *faults: Exception) -> None:
        self.faults, self.made = list(faults), 0

    async def __call__(self) -> str:
        self.made += 1
        if self.faults:
            raise self.faults.pop(0)
        return "done"


async def test_what_passes_is_waited_for_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    attempt = Attempts(errors.ConnectionError("refused"), errors.ReadOnlyError("replica"), FULL)
    assert await patiently(attempt, patience=None, doing="enqueuing") == "done"
    assert attempt.made == 4
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0] == "refused; waiting to go on with: enqueuing"
    assert said[1].startswith("Redis is back")


async def test_what_does_not_pass_is_raised_at_once() -> None:
    attempt = Attempts(errors.AuthenticationError("wrong password"))
    with pytest.raises(RedisUnusable, match="wrong password"):
        await patiently(attempt, patience=None, doing="reading")
    assert attempt.made == 1


async def test_patience_ends_with_the_last_fault() -> None:
    attempt = Attempts(*[errors.ConnectionError("refused")] * 100)
    with pytest.raises(RedisAway):
        await patiently(attempt, patience=0, doing="reading")
    with pytest.raises(QueueFull, match="Raise maxmemory"):
        await patiently(Attempts(*[FULL] * 100), patience=0, doing="enqueuing")
    oom = errors.OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")
    with pytest.raises(QueueFull, match="Raise maxmemory"):
        await patiently(Attempts(*[oom] * 100), patience=0, doing="enqueuing")


async def test_errors_of_our_own_are_not_touched() -> None:
    with pytest.raises(ValueError, match="mine"):
        await patiently(Attempts(ValueError("mine")), patience=None, doing="reading")


async def test_the_server_s_own_words_are_understood(
    own_valkey: Callable[..., ValkeyServer],
) -> None:
    server = own_valkey(requirepass="secret")
    stranger = Redis.from_url(server.url)
    with pytest.raises(RedisUnusable, match="Authentication required"):
        await patiently(stranger.ping, patience=None, doing="asking")
    guesser = Redis.from_url(f"{server.url}?password=guess")
    with pytest.raises(RedisUnusable, match="invalid username-password pair"):
        await patiently(guesser.ping, patience=None, doing="asking")
    friend = Redis.from_url(f"{server.url}?password=secret")
    assert await patiently(friend.ping, patience=None, doing="asking")
    await friend.config_set("maxmemory", 1)
    with pytest.raises(errors.OutOfMemoryError) as full:
        await friend.set("a", "b")
    assert passes(full.value)
    for connection in (stranger, guesser, friend):
        await connection.aclose(close_connection_pool=True)
