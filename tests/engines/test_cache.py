"""Why a running conversation's next turn goes ahead of its run's new ones: its history is still in the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.engines.conftest import ENGINES
from tests.engines.queued import through_a_queue
from tests.engines.talking import Tokens, talk
from tests.processes import ValkeyServer

from turnmill import Client
from turnmill.settings import Farm
from turnmill_worker.engines.base import Capacity, Engine

pytestmark = pytest.mark.timeout(400)

SLOTS, CONVERSATIONS = 4, 200


@pytest.fixture(scope="session", params=[one for one in ENGINES if one.id in ("sglang", "vllm")])
def engine(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.getfixturevalue(request.param)
    return found


class FewSlots:
    """The session's engine with fewer slots, so that few conversations are in it at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def capacity(self) -> Capacity:
        return replace(self._engine.capacity(), slots=SLOTS)


def test_conversations_find_their_history_because_their_next_turn_goes_ahead(
    engine: Engine, own_valkey: Callable[..., ValkeyServer]
) -> None:
    farm = Farm(own_valkey().url)

    async def both_ways() -> tuple[Tokens, Tokens]:
        async with Client(farm.url, run="talks") as client:
            model = engine.served_name
            return (
                await talk(client, model, "ahead", CONVERSATIONS, ahead=True),
                await talk(client, model, "in turn", CONVERSATIONS, ahead=False),
            )

    ahead, in_turn = through_a_queue(FewSlots(engine), farm, both_ways)
    # More than the cache holds is under way, or the order would not matter.
    kv_tokens = engine.capacity().kv_tokens
    assert kv_tokens is not None
    assert in_turn.prompt / 2 > kv_tokens
    assert in_turn.share < 0.3
    assert ahead.share > 0.5
