"""Streams: text while it is made, across the death of a worker; and completions of prompts."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

from redis.asyncio import Redis
from tests.gateway.serving import Asking, GatewayProcess, chat, half_a_minute_later
from tests.processes import SimWorker, until_async

from turnmill.gateway.server import bind
from turnmill.queue import Queue
from turnmill.settings import Farm
from turnmill.store import Store

Serve = Callable[..., GatewayProcess]
MakeAsking = Callable[..., Asking]
WorkerFactory = Callable[..., SimWorker]

SLOW = ("--answer", "chain", "--answer-tokens", "40", "--tokens-per-second", "15")


async def pieces(client: Asking, body: dict[str, Any]) -> AsyncIterator[str]:
    """The text of a stream, as it comes."""
    content = json.dumps(body | {"stream": True})
    async with client.http.stream("POST", "/chat/completions", content=content) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                if text := choice["delta"].get("content"):
                    yield text


async def test_text_comes_while_it_is_made_and_goes_on_after_a_death(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking, client: Redis, farm: Farm
) -> None:
    first = worker(lease=0.5, sim=SLOW)
    asked = asking(f"{serve('--insecure').url}/runs/run/attempts/1/v1")
    heard: list[str] = []
    async for piece in pieces(asked, chat()):
        heard.append(piece)
        if len(heard) == 2:
            assert (await Queue(client, farm.keys).depth("sim")).running == 1
            first.kill()
            worker(lease=0.5, sim=SLOW)
    assert len(heard) > 2
    (hash,) = [raw.decode() for raw in await client.smembers(farm.keys.turns("sim", "run"))]
    reply = await Store(client, farm.keys).reply(hash)
    assert reply is not None
    assert "".join(heard) == reply.message.content
    assert reply.usage.completion_tokens == 40


async def test_who_hangs_up_in_the_middle_is_noticed(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking, client: Redis, farm: Farm
) -> None:
    worker(lease=0.5, sim=(*SLOW[:2], "--answer-tokens", "5000", *SLOW[4:]))
    base = serve("--insecure").url
    reading = pieces(asking(f"{base}/v1"), chat())
    await anext(reading)
    await reading.aclose()
    metrics = asking(base)

    async def noticed() -> bool:
        text = (await metrics.http.get("/metrics")).text
        return "turnmill_gateway_hang_ups_total 1" in text

    await until_async(noticed, "the hang-up is counted")
    (held,) = await client.zrange(farm.keys.held("sim"), 0, -1)
    await half_a_minute_later(client, farm, [held])

    async def idle() -> bool:
        return (await Queue(client, farm.keys).depth("sim")).running == 0

    await until_async(idle, "the turn is cancelled")


async def test_text_with_log_probabilities_comes_in_one_piece(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking
) -> None:
    worker()
    chunks = await asking(f"{serve('--insecure').url}/v1").chunks(
        chat("Hello there", logprobs=True, top_logprobs=1)
    )
    texts = [c["choices"][0] for c in chunks if c["choices"][0]["delta"].get("content")]
    assert [choice["delta"]["content"] for choice in texts] == ["Hello there"]


async def test_completions(serve: Serve, worker: WorkerFactory, asking: MakeAsking) -> None:
    worker()
    client = asking(f"{serve('--insecure').url}/v1")
    body = {"model": "sim", "prompt": "Once upon a time", "max_tokens": 2, "temperature": 0}
    response = await client.post(body, path="/completions")
    assert response.status_code == 200, response.text
    whole = response.json()
    assert whole["object"] == "text_completion"
    (choice,) = whole["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason"}
    assert choice["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 2
    several = body | {"prompt": ["Once", "upon a time"], "n": 2}
    choices = (await client.post(several, path="/completions")).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert choices[0]["text"] == choices[1]["text"] != choices[2]["text"]
    response = await client.post(body | {"stream": True}, path="/completions")
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    for wrong in ({"prompt": [1, 2]}, {"prompt": ""}, {"echo": True}, {"messages": []}):
        response = await client.post(body | wrong, path="/completions")
        assert response.status_code == 400
        assert response.json()["error"]["param"] in wrong


def test_what_follows_the_head_of_a_response_is_sent_at_once() -> None:
    """asyncio looks at the protocol of a socket to turn Nagle's algorithm off."""
    with bind("127.0.0.1", 0, insecure=True) as bound:
        assert bound.proto == socket.IPPROTO_TCP
