"""Stock arq clients: what they enqueue is a turn, and they get its result as from any arq worker."""

from __future__ import annotations

import json
import pickle
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from arq.connections import ArqRedis, RedisSettings, create_pool
from arq.jobs import Job, JobStatus
from redis.asyncio import Redis
from tests.processes import SimWorker, ValkeyServer, until_async

from turnmill.settings import Farm
from turnmill.turn import Turn
from turnmill_worker.engines.sim import history_hash

HISTORY = ("--answer", "history-hash")


def turn(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def expected(fields: dict[str, Any]) -> str:
    return history_hash(Turn.model_validate({"model": "sim", **fields}).messages)


def dump(value: Any) -> bytes:
    return json.dumps(value).encode()


CLIENTS = [
    pytest.param({}, id="pickle"),
    pytest.param({"job_serializer": dump, "job_deserializer": json.loads}, id="json"),
]


@pytest.fixture(params=CLIENTS)
async def arq(
    request: pytest.FixtureRequest, valkey: ValkeyServer, farm: Farm
) -> AsyncIterator[ArqRedis]:
    """A client as arq's own documentation makes one, with the model's queue as its default."""
    settings = RedisSettings(unix_socket_path=str(valkey.socket))
    pool = await create_pool(settings, default_queue_name=farm.keys.due("sim"), **request.param)
    yield pool
    await pool.aclose()


async def enqueue(arq: ArqRedis, *args: Any, **options: Any) -> Job:
    job = await arq.enqueue_job("answer_turn", *args, **options)
    assert job is not None
    return job


async def test_a_job_is_answered(arq: ArqRedis, worker: Callable[..., SimWorker]) -> None:
    worker(sim=HISTORY)
    asked = [turn(f"How is mill {number}?") for number in range(20)]
    jobs = [await enqueue(arq, fields) for fields in asked]
    for fields, job in zip(asked, jobs, strict=True):
        reply = await job.result(timeout=20, poll_delay=0.05)
        assert reply["message"]["content"] == expected(fields)
        assert await job.status() == JobStatus.complete
        info = await job.result_info()
        assert info is not None
        assert info.success
        assert (info.function, info.queue_name) == ("answer_turn", arq.default_queue_name)


async def test_equal_jobs_are_two_draws_unless_the_turn_is_shared(
    arq: ArqRedis, worker: Callable[..., SimWorker]
) -> None:
    worker(sim=HISTORY)
    draws = [await enqueue(arq, turn("x")) for _ in range(2)]
    shared = [await enqueue(arq, turn("x", sampling={"temperature": 0})) for _ in range(2)]
    hashes = [(await job.result(timeout=20, poll_delay=0.05))["hash"] for job in (*draws, *shared)]
    assert hashes[0] != hashes[1]
    assert hashes[2] == hashes[3]


async def test_a_job_is_deferred(
    arq: ArqRedis, worker: Callable[..., SimWorker], client: Redis, farm: Farm
) -> None:
    worker(sim=HISTORY)
    later = await enqueue(arq, turn("later"), _defer_by=3600)
    now = await enqueue(arq, turn("now"))
    await now.result(timeout=20, poll_delay=0.05)
    assert await later.status() == JobStatus.deferred


@pytest.mark.parametrize(
    ("args", "options", "what"),
    [
        ((turn("x", model="other"),), {}, "model 'other' was put into the queue of 'sim'"),
        (({"messages": []},), {}, "messages"),
        ((turn("x", sampling={"temprature": 1}),), {}, "temprature"),
        (("hello",), {}, "one object"),
        ((turn("x"),), {"priority": 11}, "priority 11"),
        ((turn("x"),), {"colour": "red"}, "one object"),
    ],
)
async def test_a_wrong_job_fails_with_the_reason(
    arq: ArqRedis,
    worker: Callable[..., SimWorker],
    args: tuple[Any, ...],
    options: dict[str, Any],
    what: str,
) -> None:
    worker()
    job = await enqueue(arq, *args, **options)
    with pytest.raises(Exception, match=what):  # RuntimeError, or arq's SerializationError
        await job.result(timeout=20, poll_delay=0.05)


async def test_another_function_is_refused(arq: ArqRedis, worker: Callable[..., SimWorker]) -> None:
    worker()
    job = await arq.enqueue_job("send_mail", "a", "b")
    assert job is not None
    with pytest.raises(Exception, match="no function 'send_mail' here"):
        await job.result(timeout=20, poll_delay=0.05)


async def test_a_failure_is_raised(arq: ArqRedis, worker: Callable[..., SimWorker]) -> None:
    worker(sim=("--reject-if", "grind"))
    job = await enqueue(arq, turn("grind this"))
    with pytest.raises(Exception, match="invalid_request: the engine was told to refuse"):
        await job.result(timeout=20, poll_delay=0.05)


async def test_jobs_outlive_their_workers(
    arq: ArqRedis, worker: Callable[..., SimWorker], client: Redis, farm: Farm
) -> None:
    first = worker(sim=(*HISTORY, "--latency", "30"))
    asked = [turn(f"mill {number}") for number in range(5)]
    jobs = [await enqueue(arq, fields) for fields in asked]

    async def running() -> bool:
        return int(await client.zcard(farm.keys.leases("sim"))) == 5

    await until_async(running, "the turns run")
    first.kill()
    worker(sim=HISTORY)
    for fields, job in zip(asked, jobs, strict=True):
        reply = await job.result(timeout=20, poll_delay=0.05)
        assert reply["message"]["content"] == expected(fields)
    assert await client.zcard(farm.keys.due("sim")) == 0
    assert await client.keys(f"{farm.keys.prefix}a:*") == []


class Touch:
    """Its unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


async def test_no_code_in_a_job_is_run(
    farm: Farm,
    valkey: ValkeyServer,
    worker: Callable[..., SimWorker],
    client: Redis,
    tmp_path: Path,
) -> None:
    one = worker()
    settings = RedisSettings(unix_socket_path=str(valkey.socket))
    pool = await create_pool(settings, default_queue_name=farm.keys.due("sim"))
    job = await enqueue(pool, Touch(tmp_path / "touched"))
    with pytest.raises(RuntimeError, match="plain values only"):
        await job.result(timeout=20, poll_delay=0.05)
    assert not (tmp_path / "touched").exists()
    assert one.process.poll() is None
    await pool.aclose()


@pytest.mark.parametrize("wrong", [{"a": 5}, {"k": [1]}])
async def test_a_job_of_a_wrong_shape_fails_and_ends_no_worker(
    arq: ArqRedis,
    worker: Callable[..., SimWorker],
    client: Redis,
    farm: Farm,
    wrong: dict[str, Any],
) -> None:
    one = worker()
    job = await enqueue(arq, turn("x"), _defer_by=3600)
    record = {"t": 1, "f": "answer_turn", "a": [turn("x")], "k": {}, "et": 0, **wrong}
    serialized = pickle.dumps(record) if arq.job_serializer is None else dump(record)
    await client.set(f"arq:job:{job.job_id}", serialized)
    await client.zadd(farm.keys.due("sim"), {job.job_id: 1, b"\xff\xfe": 1})
    with pytest.raises(Exception, match="not a job"):
        await job.result(timeout=20, poll_delay=0.05)
    good = await enqueue(arq, turn("y"))
    await good.result(timeout=20, poll_delay=0.05)
    assert one.process.poll() is None


async def test_a_record_that_is_no_job_fails(
    arq: ArqRedis, worker: Callable[..., SimWorker], client: Redis, farm: Farm
) -> None:
    worker()
    job = await enqueue(arq, turn("x"), _defer_by=3600)
    broken = b"\x80garbage" if arq.job_serializer is None else b"{garbage"
    await client.set(f"arq:job:{job.job_id}", broken)
    await client.zadd(farm.keys.due("sim"), {job.job_id: 1})
    with pytest.raises(Exception, match="cannot be read"):
        await job.result(timeout=20, poll_delay=0.05)
