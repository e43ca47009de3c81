"""Reads of what is kept. No script runs here, so a server in this process will do."""

from __future__ import annotations

from typing import Any

import pytest
from fakeredis import FakeAsyncRedis

from turnmill.errors import RecordError
from turnmill.keys import Keys
from turnmill.reply import EngineIdentity, Failure, Reply, Trace
from turnmill.store import READ_BATCH, Store
from turnmill.turn import Message, Turn
from turnmill.wire import encode, encode_turn

KEYS = Keys("n")
FAILURE = Failure(hash="a", kind="engine_error", text="no")


def reply(hash: str) -> Reply:
    return Reply(hash=hash, message=Message(role="assistant", content=hash), finish_reason="stop")


def engine(version: str) -> EngineIdentity:
    return EngineIdentity(engine="sim", version=version, model="m")


@pytest.fixture
def redis() -> Any:
    return FakeAsyncRedis()


@pytest.fixture
def store(redis: Any) -> Store:
    return Store(redis, KEYS)


async def test_what_is_not_there_is_none(store: Store) -> None:
    assert await store.reply("a") is None
    assert await store.failure("a") is None
    assert await store.trace("a") is None
    assert await store.turn("a") is None
    assert await store.manifest("run") is None
    assert await store.endings("run", ["a"]) == {}
    assert await store.endings("run", []) == {}
    assert await store.engines(["a"]) == []
    assert (await store.workers(), await store.models(), await store.runs()) == ([], [], [])


async def test_an_ending_is_what_a_run_is_to_see(store: Store, redis: Any) -> None:
    failed = {"kind": FAILURE.kind, "record": encode(FAILURE)}
    await redis.hset(KEYS.failure("a"), mapping=failed)
    await redis.hset(KEYS.failure("b"), mapping=failed)
    await redis.hset(KEYS.leavers("b"), "run", "cancelled")
    await redis.hset(KEYS.leavers("c"), mapping={"run": "deadline", "other": "cancelled"})
    await redis.hset(KEYS.leavers("d"), "run", "cancelled")
    await redis.set(KEYS.reply("d"), encode(reply("d")))
    endings = await store.endings("run", ["a", "b", "c", "d", "e"])
    kinds = {hash: getattr(ending, "kind", "reply") for hash, ending in endings.items()}
    assert kinds == {"a": "engine_error", "b": "cancelled", "c": "deadline", "d": "reply"}
    assert set(await store.endings("third", list("abcde"))) == {"a", "b", "d"}


async def test_many_endings_are_read_in_batches(store: Store, redis: Any) -> None:
    hashes = [f"{number}" for number in range(2 * READ_BATCH + 1)]
    await redis.mset({KEYS.reply(hash): encode(reply(hash)) for hash in hashes})
    endings = await store.endings("run", hashes)
    assert [endings[hash] for hash in hashes] == [reply(hash) for hash in hashes]


async def test_a_damaged_record_is_said(store: Store, redis: Any) -> None:
    await redis.set(KEYS.reply("a"), b"damaged")
    with pytest.raises(RecordError, match="not JSON"):
        await store.reply("a")


async def test_engines_are_told_once_in_the_order_in_which_they_are_met(
    store: Store, redis: Any
) -> None:
    made_by = {"a": engine("2"), "b": engine("1"), "c": engine("2"), "d": None}
    for hash, identity in made_by.items():
        trace = Trace(hash=hash, worker="w", outcome="completed", engine=identity)
        await redis.set(KEYS.trace(hash), encode(trace))
    assert await store.engines(["a", "b", "c", "d", "e"]) == [engine("2"), engine("1")]


async def test_a_turn_comes_back(store: Store, redis: Any) -> None:
    turn = Turn(model="m", messages=[Message(role="user", content="long " * 2000)])
    await redis.set(KEYS.body(turn.hash), encode_turn(turn))
    assert await store.turn(turn.hash) == turn


async def test_models_are_what_their_queues_are_called_by(store: Store, redis: Any) -> None:
    await redis.sadd(KEYS.models, KEYS.queue("org/m:7b"), KEYS.queue("a"))
    assert await store.models() == ["a", "org/m:7b"]


async def test_counters_that_were_never_counted_are_zero(store: Store, redis: Any) -> None:
    await redis.sadd(KEYS.runs, "b", "a")
    await redis.hset(KEYS.run("a"), mapping={"total": 3, "done": 2, "weight": "1.0"})
    one, two = await store.runs()
    assert (one.name, one.total, one.done, one.failed, one.cancelled) == ("a", 3, 2, 0, 0)
    assert (two.name, two.total) == ("b", 0)
