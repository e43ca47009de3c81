"""Images in messages: an engine is given them as they were sent, byte for byte."""

from __future__ import annotations

import base64
import random
from typing import Any

from tests.gateway.test_endpoints import MakeAsking, Serve, WorkerFactory

from turnmill import Client, Message, Reply, Turn
from turnmill.settings import Farm
from turnmill_worker.engines.sim import history_hash

PICTURE = base64.b64encode(random.Random(7).randbytes(300_000)).decode()


def image(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def asking_about(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": "Look well."},
        {"role": "user", "content": [{"type": "text", "text": "What is this?"}, *parts]},
        {"role": "assistant", "content": "A mill."},
        {"role": "user", "content": [image("https://example.com/river.png")]},
    ]


CONVERSATION = asking_about(
    image(f"data:image/png;base64,{PICTURE}", detail="high"),
    image("data:image/webp;base64,UklGRg==", detail="low"),
)


def digest(messages: list[dict[str, Any]]) -> str:
    return history_hash([Message.model_validate(message) for message in messages])


async def test_images_come_unchanged_through_the_front_door(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking
) -> None:
    worker(sim=("--answer", "history-hash"))
    door = asking(f"{serve('--insecure').url}/v1")
    response = await door.post({"model": "sim", "messages": CONVERSATION, "temperature": 0})
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == digest(CONVERSATION)


async def test_images_come_unchanged_through_the_queue(worker: WorkerFactory, farm: Farm) -> None:
    worker(sim=("--answer", "history-hash"))
    other = asking_about(*CONVERSATION[1]["content"][:0:-1])  # another order
    async with Client(farm.url, namespace=farm.namespace) as client:
        for messages in (CONVERSATION, other):
            turn = Turn.from_body({"model": "sim", "messages": messages})
            reply = await client.ask(turn)
            assert isinstance(reply, Reply)
            assert reply.message.content == digest(messages)
    assert digest(CONVERSATION) != digest(other)
