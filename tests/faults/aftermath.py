"""Turns for fault tests, and what must be true when their faults are over."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from tests.processes import until_async

from turnmill.client import Client
from turnmill.queue import Depth
from turnmill.reply import Reply, Trace
from turnmill.store import Ending
from turnmill.turn import Turn
from turnmill.wire import decode
from turnmill_worker.audit import Audit, audit
from turnmill_worker.engines.sim import history_hash

HASHING = ("--answer", "history-hash")
"""Arguments of the scripted engine: what it answers proves that the whole turn came through."""

PATIENCE = 60.0
"""Seconds until all that was asked must have ended."""


def turns(count: int, name: str = "turn") -> list[Turn]:
    return [
        Turn.model_validate(
            {"model": "sim", "messages": [{"role": "user", "content": f"{name} {i}"}]}
        )
        for i in range(count)
    ]


class Asked:
    """Turns that a client waits for, all at once."""

    def __init__(self, client: Client, asked: Sequence[Turn]) -> None:
        self.turns = asked
        self._asks = [asyncio.ensure_future(client.ask(turn)) for turn in asked]

    @property
    def ended(self) -> int:
        return sum(ask.done() for ask in self._asks)

    async def until_ended(self, count: int) -> None:
        async def reached() -> bool:
            return self.ended >= count

        await until_async(reached, f"{count} turns have ended", PATIENCE)
        assert self.ended < len(self._asks), "nothing is left for the fault to disturb"

    async def end_right(self, seconds: float = PATIENCE) -> None:
        endings = await asyncio.wait_for(asyncio.gather(*self._asks), seconds)
        assert right(self.turns, endings)


async def all_is_well(
    client: Client, asked: Sequence[Turn], *, tries: Collection[str] = ("handback",)
) -> None:
    """Every turn that the client's run asked for has its own reply, stored once; nothing is left in the
    queue; and no try ended otherwise than in `tries` (lapses and deaths would have struck)."""
    redis, keys = client.store.redis, client.farm.keys
    assert await audit(redis, keys, asked, client.lane.run) == Audit(0, 0, 0, 0)
    assert await client.queue.depth(asked[0].model) == Depth(0, 0, 0, 0)
    outcomes = Counter(t.outcome for trace in await traces(client, asked) for t in trace.earlier)
    assert set(outcomes) <= set(tries), outcomes


async def traces(client: Client, asked: Sequence[Turn]) -> list[Trace]:
    found = []
    for start in range(0, len(asked), 1000):
        names = [client.farm.keys.trace(turn.hash) for turn in asked[start : start + 1000]]
        found += [decode(Trace, data) for data in await client.store.redis.mget(names) if data]
    return found


def right(asked: Iterable[Turn], endings: Iterable[Ending]) -> bool:
    """Whether each ending is the reply to its turn: what the asker was told, whatever Redis has kept."""
    return all(
        isinstance(ending, Reply)
        and ending.hash == turn.hash
        and ending.message.content == history_hash(turn.messages)
        for turn, ending in zip(asked, endings, strict=True)
    )
