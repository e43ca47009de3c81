"""A service in another language, which knows nothing of turnmill but docs/protocol.md."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.processes import SimWorker, ValkeyServer

from turnmill.client import Client
from turnmill.reply import Reply
from turnmill.settings import Farm
from turnmill.turn import Turn
from turnmill_worker.engines.sim import history_hash

pytestmark = [pytest.mark.clients, pytest.mark.timeout(400)]

TURNS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Grüße aus der Mühle 🌾"}]},
    {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "How fine?"}]}],
        "sampling": {"temperature": 0.1, "top_p": 1.0, "max_tokens": 20},
        "sample": 7,
    },
    {"messages": [{"role": "user", "content": "long " * 3000}]},
]


def ask(node: Path, valkey: ValkeyServer, farm: Farm, fields: dict[str, Any]) -> Any:
    environment = {"REDIS_SOCKET": str(valkey.socket), "TURNMILL_NAMESPACE": farm.namespace}
    process = subprocess.run(
        ["node", "ask.mjs", "sim", json.dumps(fields)],
        cwd=node,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.mark.parametrize("fields", TURNS, ids=["unicode", "parts", "long"])
def test_a_node_script_enqueues_and_reads_the_reply(
    node: Path,
    valkey: ValkeyServer,
    farm: Farm,
    worker: Callable[..., SimWorker],
    fields: dict[str, Any],
) -> None:
    worker(sim=("--answer", "history-hash", "--latency", "0.3"))
    turn = Turn.model_validate({"model": "sim", **fields})
    said = ask(node, valkey, farm, fields)
    assert said["hash"] == turn.hash
    assert said["state"] == "answered"
    assert said["reply"]["message"]["content"] == history_hash(turn.messages)


async def test_both_languages_share_an_answer(
    node: Path, valkey: ValkeyServer, farm: Farm, worker: Callable[..., SimWorker]
) -> None:
    worker(sim=("--answer", "chain", "--answer-tokens", "5"))
    fields = {"messages": [{"role": "user", "content": "Who?"}], "sampling": {"temperature": 0}}
    said = await asyncio.to_thread(ask, node, valkey, farm, fields)
    async with Client(farm.url, namespace=farm.namespace) as client:
        state, ending = await client.ask_stating(Turn.model_validate({"model": "sim", **fields}))
    assert state == "answered"
    assert isinstance(ending, Reply)
    assert ending.message.content == said["reply"]["message"]["content"]


def test_a_failure_is_seen(
    node: Path, valkey: ValkeyServer, farm: Farm, worker: Callable[..., SimWorker]
) -> None:
    worker(sim=("--reject-if", "chaff"))
    said = ask(node, valkey, farm, {"messages": [{"role": "user", "content": "chaff"}]})
    assert (said["state"], said["reply"]) == ("failed", None)
