"""Keys: who may ask, for what, and whose runs are whose."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import Redis
from tests.gateway.serving import Asking, GatewayProcess, chat, error_of
from tests.processes import SimWorker, until_async

from turnmill.settings import Farm

Serve = Callable[..., GatewayProcess]
MakeAsking = Callable[..., Asking]
WorkerFactory = Callable[..., SimWorker]


async def make_key(cli: Any, *arguments: str) -> str:
    done = await asyncio.to_thread(cli, "keys", "add", *arguments)
    key = done.stdout.strip()
    assert key.startswith("sk-")
    assert key not in done.stderr
    return str(key)


def status(base: str, authorization: str) -> int:
    """Of the response to a chat. httpx refuses to send `Bearer ` with nothing behind it; others do."""
    url = urlsplit(base)
    connection = http.client.HTTPConnection(url.netloc, timeout=20)
    try:
        headers = {"Authorization": authorization}
        connection.request("POST", f"{url.path}/chat/completions", json.dumps(chat()), headers)
        return connection.getresponse().status
    finally:
        connection.close()


async def test_who_has_no_key_is_refused(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking, on_farm: Any
) -> None:
    worker()
    base = f"{serve().url}/v1"
    key = await make_key(on_farm, "alice")
    assert await asking(base, key).content(chat()) == "Hello"
    assert await asyncio.to_thread(status, base, "Bearer ") == 401
    for authorization in ("", "Bearer", "Bearer sk-wrong", f"Basic {key}", key):
        headers = {"Authorization": authorization}
        response = await asking(base).post(chat(), headers)
        assert response.status_code == 401
        error_of(response)
        assert (await asking(base).http.get("/models", headers=headers)).status_code == 401


async def test_insecure_takes_any_key_and_none(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking
) -> None:
    worker()
    base = f"{serve('--insecure').url}/v1"
    for authorization in ("", "Bearer ", "Bearer sk-any"):
        assert await asyncio.to_thread(status, base, authorization) == 200


async def test_keys_are_hashed_listed_and_revoked(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking, on_farm: Any, client: Redis, farm: Farm
) -> None:
    worker()
    key = await make_key(on_farm, "alice", "--models", "sim,other", "--max-queued", "3")
    stored = [
        part
        async for name in client.scan_iter(f"{farm.namespace}:api_key*")
        for pair in (await client.hgetall(name)).items()
        for part in pair
    ]
    assert len(stored) == 4
    assert not any(key[3:].encode() in part for part in stored)
    done = await asyncio.to_thread(on_farm, "keys", "add", "alice", exits=2)
    assert "alice" in done.stderr
    (listed,) = json.loads((await asyncio.to_thread(on_farm, "keys", "list", "--json")).stdout)
    assert (listed["name"], listed["models"], listed["max_queued"]) == (
        "alice",
        ["sim", "other"],
        3,
    )
    asked = asking(f"{serve().url}/v1", key)
    assert (await asked.post(chat())).status_code == 200
    await asyncio.to_thread(on_farm, "keys", "revoke", "alice")
    await asyncio.to_thread(on_farm, "keys", "revoke", "alice", exits=2)

    async def refused() -> bool:
        return (await asked.post(chat())).status_code == 401

    await until_async(refused, "the key is known no more")


async def test_a_key_asks_for_its_models_only(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking, on_farm: Any
) -> None:
    worker()
    worker("--served-name", "other")
    base = f"{serve().url}/v1"
    key = await make_key(on_farm, "alice", "--models", "other")
    asked = asking(base, key)
    models = (await asked.http.get("/models")).json()["data"]
    assert [model["id"] for model in models] == ["other"]
    assert (await asked.post(chat(model="other"))).status_code == 200
    response = await asked.post(chat())
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


async def test_a_run_belongs_to_its_first_key(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking, on_farm: Any
) -> None:
    worker()
    base = serve().url
    alice, bob = await make_key(on_farm, "alice"), await make_key(on_farm, "bob")
    url = f"{base}/runs/mine/attempts/1"
    assert await asking(f"{url}/v1", alice).content(chat()) == "Hello"
    response = await asking(f"{url}/v1", bob).post(chat())
    assert response.status_code == 403
    assert error_of(response)["code"] == "not_your_run"
    assert (await asking(base, bob).http.get("/runs/mine/attempts/1")).status_code == 403
    assert (await asking(base, alice).http.get("/runs/mine/attempts/1")).json()["made"] == 1


async def test_what_is_refused_makes_no_run_anybodys(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking, on_farm: Any, client: Redis, farm: Farm
) -> None:
    worker()
    base = serve().url
    alice = await make_key(on_farm, "alice")
    bob = await make_key(on_farm, "bob", "--models", "other")
    url = f"{base}/runs/mine/attempts/1"
    assert (await asking(base, bob).http.get("/runs/mine/attempts/1")).json()["made"] == 0
    assert (await asking(f"{url}/v1", bob).post(chat())).status_code == 404
    assert not await client.exists(farm.keys.run("mine"))
    assert await asking(f"{url}/v1", alice).content(chat()) == "Hello"
    assert (await asking(base, bob).http.get("/runs/mine/attempts/1")).status_code == 403


async def test_a_bound_counts_no_run_that_was_forgotten(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking, on_farm: Any, client: Redis, farm: Farm
) -> None:
    worker()
    base = serve().url
    key = await make_key(on_farm, "alice", "--max-queued", "1")
    assert await asking(f"{base}/runs/mine/v1", key).content(chat()) == "Hello"
    await asyncio.to_thread(on_farm, "forget", "mine", "--yes")
    await client.hset(farm.keys.run("mine"), mapping={"owner": "bob", "total": 5})

    async def answered() -> bool:
        return (await asking(f"{base}/v1", key).post(chat())).status_code == 200

    await until_async(answered, "there is room")
    assert await client.smembers(farm.keys.runs_of("alice")) == {b"adhoc.alice"}


async def test_draws_of_two_keys_are_never_merged(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking, on_farm: Any
) -> None:
    worker(sim=("--answer", "chain"))
    base = f"{serve().url}/v1"
    keys = [await make_key(on_farm, name) for name in ("alice", "bob")]
    named = {"Idempotency-Key": "1"}
    assert len({await asking(base, key).content(chat(), named) for key in keys}) == 2


async def test_a_key_has_a_bound_of_its_own(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking, on_farm: Any
) -> None:
    worker(sim=("--hang-if", "stuck"))
    base = serve().url
    alice = await make_key(on_farm, "alice", "--max-queued", "2")
    bob = await make_key(on_farm, "bob")
    asked = [asking(f"{base}/v1", alice), asking(f"{base}/runs/r/v1", alice)]
    waiting = [asyncio.ensure_future(client.post(chat("stuck"))) for client in asked]

    async def full() -> bool:
        response = await asked[0].post(chat())
        return response.status_code == 429 and "retry-after" in response.headers

    await until_async(full, "two turns of the key are open")
    assert await asking(f"{base}/v1", bob).content(chat()) == "Hello"
    for task in waiting:
        task.cancel()
