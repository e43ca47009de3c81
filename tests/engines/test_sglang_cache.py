"""Why a running conversation's next turn goes ahead of its run's new ones: its history is still in the cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.engines.talking import Tokens, talk
from tests.processes import ValkeyServer

from turnmill import Client
from turnmill.settings import Farm
from turnmill_worker.engines.base import Capacity
from turnmill_worker.engines.sglang import SGLangEngine
from turnmill_worker.worker import TurnWorker

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

SLOTS, CONVERSATIONS = 4, 200


class FewSlots:
    """The session's engine with fewer slots, so that few conversations are in it at a time."""

    def __init__(self, engine: SGLangEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def capacity(self) -> Capacity:
        return replace(self._engine.capacity(), slots=SLOTS)


def test_conversations_find_their_history_because_their_next_turn_goes_ahead(
    sglang_engine: SGLangEngine, own_valkey: Callable[..., ValkeyServer]
) -> None:
    ahead, in_turn = _through_a_queue(sglang_engine, Farm(own_valkey().url))
    # More than the cache holds is under way, or the order would not matter.
    kv_tokens = sglang_engine.capacity().kv_tokens
    assert kv_tokens is not None
    assert in_turn.prompt / 2 > kv_tokens
    assert in_turn.share < 0.3
    assert ahead.share > 0.5


def _through_a_queue(engine: SGLangEngine, farm: Farm) -> tuple[Tokens, Tokens]:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    worker = TurnWorker(FewSlots(engine), farm)

    async def ask() -> tuple[Tokens, Tokens]:
        try:
            async with Client(farm.url, run="talks") as client:
                model = engine.served_name
                return (
                    await talk(client, model, "ahead", CONVERSATIONS, ahead=True),
                    await talk(client, model, "in turn", CONVERSATIONS, ahead=False),
                )
        finally:
            worker.stop()

    asking = loop.create_task(ask())
    worker.run()
    found = loop.run_until_complete(asking)
    loop.close()
    return found
