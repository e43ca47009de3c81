"""The endpoints of a gateway, with real workers."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from tests.gateway.serving import Asking, GatewayProcess, chat, error_of
from tests.processes import SimWorker, ValkeyServer, until_async

from turnmill.api_keys import ApiKeys
from turnmill.settings import Farm

Serve = Callable[..., GatewayProcess]
MakeAsking = Callable[..., Asking]
WorkerFactory = Callable[..., SimWorker]


async def test_a_chat(serve: Serve, worker: WorkerFactory, asking: MakeAsking) -> None:
    worker()
    client = asking(f"{serve('--insecure').url}/v1")
    response = await client.post(chat("Hello there", max_tokens=1))
    assert response.status_code == 200
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "sim"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "finish_reason": "length",
            "logprobs": None,
        }
    ]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 1
    assert body["usage"]["total_tokens"] == 4


async def test_several_choices(serve: Serve, worker: WorkerFactory, asking: MakeAsking) -> None:
    worker(sim=("--answer", "chain", "--answer-tokens", "4"))
    client = asking(f"{serve('--insecure').url}/v1")
    body = (await client.post(chat(n=3))).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in body["choices"]}) == 3
    assert body["usage"]["prompt_tokens"] == 2
    assert body["usage"]["completion_tokens"] == 12


async def test_a_stream(serve: Serve, worker: WorkerFactory, asking: MakeAsking) -> None:
    worker()
    client = asking(f"{serve('--insecure').url}/v1")
    chunks = await client.chunks(chat("Hello there", n=2, stream_options={"include_usage": True}))
    *told, usage = chunks
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index in (0, 1):
        own = [c["choices"][0] for c in told if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in own) == "Hello there"
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["stop"]
    assert all(chunk["usage"] is None for chunk in told)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4


async def test_models(serve: Serve, worker: WorkerFactory, asking: MakeAsking) -> None:
    gateway = serve("--insecure")
    client = asking(f"{gateway.url}/v1")
    assert (await client.http.get("/models")).json() == {"object": "list", "data": []}
    worker("--served-name", "org/m", sim=("--context", "77"))

    async def listed() -> Any:
        return (await client.http.get("/models")).json()["data"]

    (model,) = await until_async(listed, "the model is listed")
    assert (model["id"], model["max_model_len"]) == ("org/m", 77)
    assert (await client.http.get("/models/org/m")).json() == model
    assert error_of(await client.http.get("/models/other"))["code"] == "model_not_found"


async def test_who_asks_for_another_name_is_told_what_is_served(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking
) -> None:
    client = asking(f"{serve('--insecure').url}/v1")
    error = error_of(await client.post(chat(model="m")))
    assert error["message"].endswith("; no worker serves any now")
    worker("--served-name", "org/m")

    async def named() -> bool:
        message = error_of(await client.post(chat(model="m")))["message"]
        return bool(message.endswith("; workers serve 'org/m'"))

    await until_async(named, "the error names what is served")


async def test_models_that_nobody_serves(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking, client: Redis, farm: Farm
) -> None:
    gateway = serve("--insecure")
    asker = asking(f"{gateway.url}/v1")
    response = await asker.post(chat())
    assert response.status_code == 404
    assert error_of(response)["param"] == "model"
    one = worker(lease=0.5)
    await until_async(lambda: client.exists(farm.keys.seen("sim")), "it has looked for turns")
    one.kill()

    async def unserved() -> bool:
        return (await asker.http.get("/models")).json()["data"] == []

    await until_async(unserved, "the worker is known to be gone")
    response = await asker.post(chat())
    assert response.status_code == 503
    assert error_of(response)["code"] == "no_worker"
    assert int(response.headers["retry-after"]) > 0

    in_a_run = asking(f"{gateway.url}/runs/r/v1")
    waiting = [asyncio.ensure_future(in_a_run.content(chat(text))) for text in ("a", "b")]

    async def queued() -> bool:
        return bool(await client.hget(farm.keys.run("r"), "total") == b"2")

    await until_async(queued, "the turns of a run are in the queue")
    worker()
    assert await asyncio.gather(*waiting) == ["a", "b"]
    assert gateway.log.count("no worker serves sim now") == 1


async def test_a_prompt_that_does_not_fit(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking
) -> None:
    worker(sim=("--context", "20"))
    base = serve("--insecure").url
    for stream in (False, True):
        response = await asking(f"{base}/v1").post(chat("a " * 50, stream=stream))
        assert response.status_code == 400
        assert error_of(response)["code"] == "context_length_exceeded"
    response = await asking(f"{base}/runs/r/attempts/a/v1").post(chat("a " * 50))
    assert response.status_code == 200
    assert response.json()["choices"][0]["finish_reason"] == "length"
    report = (await asking(base).http.get("/runs/r/attempts/a")).json()
    assert (report["made"], report["capped_context"]) == (1, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_turns_that_fail(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking, stream: bool
) -> None:
    worker(sim=("--reject-if", "wrong"))
    client = asking(f"{serve('--insecure').url}/v1")
    response = await client.post(chat("this is wrong", stream=stream))
    assert response.status_code == 400
    assert error_of(response)["code"] == "invalid_request"


async def test_deadlines(serve: Serve, worker: WorkerFactory, asking: MakeAsking) -> None:
    worker(lease=0.5, sim=("--hang-if", "stuck"))
    client = asking(f"{serve('--insecure', '--deadline', '1s').url}/v1")
    response = await client.post(chat("stuck"))
    assert response.status_code == 408
    assert error_of(response)["code"] == "deadline"
    assert await client.content(chat("fine")) == "fine"


async def test_bodies_that_are_too_large(serve: Serve, asking: MakeAsking) -> None:
    client = asking(f"{serve('--insecure', '--max-body', '1').url}/v1")
    response = await client.post(chat("a" * (1 << 20)))
    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"


async def test_errors_are_in_openai_shape_everywhere(serve: Serve, asking: MakeAsking) -> None:
    client = asking(f"{serve('--insecure').url}/v1")
    for response, status in (
        (await client.post(b"{"), 400),
        (await client.post(chat(verbosity="low")), 400),
        (await client.http.get("/nowhere"), 404),
        (await client.http.get("/chat/completions"), 405),
        (await client.http.post("/responses", json={}), 404),
    ):
        assert response.status_code == status
        error_of(response)


async def test_a_bound_on_what_is_queued(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking
) -> None:
    worker(sim=("--hang-if", "stuck"))
    client = asking(f"{serve('--insecure', '--max-queued', '2').url}/v1")
    response = await client.post(chat("x", n=3))
    assert response.status_code == 429
    assert error_of(response)["code"] == "too_many_queued"
    assert int(response.headers["retry-after"]) > 0
    assert (await client.post(chat("x", n=2))).status_code == 200


async def test_a_bound_holds_for_those_who_ask_at_once(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking
) -> None:
    worker(sim=("--hang-if", "stuck"))
    client = asking(f"{serve('--insecure', '--max-queued', '2').url}/v1")
    asked = [asyncio.ensure_future(client.post(chat("stuck"))) for _ in range(20)]

    async def refused() -> bool:
        ended = [task.result().status_code for task in asked if task.done()]
        assert ended == [429] * len(ended)
        return len(ended) == 18

    await until_async(refused, "all but two are refused")
    for task in asked:
        task.cancel()


async def test_redis_goes_away(
    serve: Serve, own_valkey: Callable[..., ValkeyServer], worker: WorkerFactory, asking: MakeAsking
) -> None:
    server = own_valkey()
    farm = Farm(server.url, "own")
    worker(farm=farm)
    base = serve("--insecure", "--patience", "1s", farm=farm).url
    client = asking(f"{base}/v1")
    assert await client.content(chat("before")) == "before"
    server.kill()
    response = await client.post(chat("while"))
    assert response.status_code == 503
    assert error_of(response)["code"] == "unavailable"
    assert (await client.http.get(f"{base}/ready")).status_code == 503
    assert (await client.http.get(f"{base}/health")).status_code == 200
    server.start()

    async def back() -> Any:
        return (await client.post(chat("after"))).status_code == 200

    await until_async(back, "it answers again")
    assert (await client.http.get(f"{base}/ready")).status_code == 200


async def test_redis_is_away_for_a_moment(
    serve: Serve, own_valkey: Callable[..., ValkeyServer], worker: WorkerFactory, asking: MakeAsking
) -> None:
    server = own_valkey()
    farm = Farm(server.url, "own")
    worker(farm=farm)
    async with farm.connect() as redis:
        key = await ApiKeys(redis, farm.keys).add("alice")
    base = serve(farm=farm).url
    clients = [asking(f"{base}{path}/v1", key) for path in ("", "/runs/run", "/runs/r/attempts/a")]
    server.kill()
    tasks = [asyncio.ensure_future(client.content(chat("while"))) for client in clients]

    async def waiting() -> bool:
        text = (await asking(base).http.get("/metrics")).text
        return "turnmill_gateway_requests_under_way 4" in text

    await until_async(waiting, "they wait")
    server.start()
    assert await asyncio.gather(*tasks) == ["while"] * 3


async def test_metrics(serve: Serve, worker: WorkerFactory, asking: MakeAsking) -> None:
    worker()
    base = serve("--insecure").url
    await asking(f"{base}/runs/secret-run/attempts/a/v1").content(chat("Hello there", max_tokens=1))
    await asking(f"{base}/v1").post(chat(n=0))
    response = await asking(base).http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = response.text.splitlines()
    for line in (
        'turnmill_gateway_requests_total{endpoint="/v1/chat/completions",status="200"} 1',
        'turnmill_gateway_requests_total{endpoint="/v1/chat/completions",status="400"} 1',
        'turnmill_gateway_turns_total{how="made"} 1',
        'turnmill_gateway_capped_total{by="output"} 1',
        'turnmill_gateway_tokens_total{kind="completion"} 1',
        'turnmill_gateway_request_seconds_bucket{le="+Inf"} 2',
        "turnmill_gateway_requests_under_way 1",
    ):
        assert line in lines
    assert "secret-run" not in response.text


async def test_it_describes_itself(serve: Serve, asking: MakeAsking) -> None:
    base = serve("--insecure").url
    schema = (await asking(base).http.get("/openapi.json")).json()
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    fields = body["content"]["application/json"]["schema"]["properties"]
    assert {"messages", "tools", "temperature", "max_completion_tokens", "stream"} <= set(fields)
    assert "/runs/{run}/attempts/{attempt}/v1/chat/completions" in schema["paths"]
    assert (await asking(base).http.get("/docs")).status_code == 200
    json.dumps(schema)


def test_a_port_that_is_taken(on_farm: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = on_farm("serve", "--insecure", "--port", str(port), exits=2)
    (line,) = done.stderr.splitlines()
    assert str(port) in line


def test_nobody_is_served_without_a_key_from_outside(on_farm: Any) -> None:
    for host in ("0.0.0.0", "::"):
        done = on_farm("serve", "--insecure", "--host", host, "--port", "0", exits=2)
        assert "--insecure" in done.stderr


def test_sigterm_ends_it(serve: Serve) -> None:
    gateway = serve("--insecure")
    gateway.process.terminate()
    assert gateway.process.wait(20) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{gateway.url}/health")


async def test_names_that_clients_choose_are_no_labels(serve: Serve, asking: MakeAsking) -> None:
    base = serve().url
    for prefix in ("", "/runs/v1", "/runs/v1/attempts/v1"):
        refused = await asking(f"{base}{prefix}/v1").http.get("/models/v1/chosen")
        assert refused.status_code == 401
    text = (await asking(base).http.get("/metrics")).text
    assert 'turnmill_gateway_requests_total{endpoint="/v1/models",status="401"} 3' in text
    assert "chosen" not in text
