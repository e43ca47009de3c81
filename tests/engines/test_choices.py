"""Several choices from a real engine, through the front door."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.engines.conftest import ENGINES
from tests.engines.queued import through_a_queue
from tests.gateway.serving import GatewayProcess
from tests.processes import ValkeyServer

from turnmill.settings import Farm
from turnmill_worker.engines.base import Engine

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="session", params=[one for one in ENGINES if one.id in ("sglang", "vllm")])
def engine(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.getfixturevalue(request.param)
    return found


def test_choices_are_draws_of_their_own(
    engine: Engine, own_valkey: Callable[..., ValkeyServer], tmp_path: Path
) -> None:
    farm = Farm(own_valkey().url)
    gateway = GatewayProcess(farm, tmp_path / "log", ("--insecure",))

    async def ask() -> list[dict[str, Any]]:
        hot = {"temperature": 1, "top_p": 1, "top_k": -1, "max_tokens": 24, "ignore_eos": True}
        body = {"messages": [{"role": "user", "content": "Draw"}], **hot, "n": 3, "logprobs": True}
        async with httpx.AsyncClient(timeout=60) as http:
            response = await http.post(
                f"{gateway.url}/v1/chat/completions", json={"model": engine.served_name, **body}
            )
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        assert found["usage"]["completion_tokens"] == 3 * 24
        choices: list[dict[str, Any]] = found["choices"]
        return choices

    try:
        choices = through_a_queue(engine, farm, ask)
    finally:
        gateway.kill()
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    drawn = {tuple(entry["token"] for entry in c["logprobs"]["content"]) for c in choices}
    assert len(drawn) == 3
    assert all(len(tokens) == 24 for tokens in drawn)
