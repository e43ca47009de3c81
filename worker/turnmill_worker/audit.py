"""What is left of a batch of turns when all is said to be over: the questions of every crash drill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redis.asyncio import Redis

from turnmill.keys import Keys
from turnmill.reply import Reply
from turnmill.store import Store
from turnmill.turn import Turn
from turnmill_worker.engines.sim import history_hash

STREAM_PAGE = 5000


@dataclass(frozen=True)
class Audit:
    """In turns. `lost`: without a reply. `stored_twice`: told to be finished more than once. `wrong`: with a
    reply that is not theirs. `held`: still leased, or owned by somebody."""

    lost: int
    stored_twice: int
    wrong: int
    held: int

    @property
    def clean(self) -> bool:
        return not (self.lost or self.stored_twice or self.wrong or self.held)


def answers_history(turn: Turn, reply: Reply) -> bool:
    """Whether a scripted engine with `--answer history-hash` could have made this of this turn."""
    return str(reply.message.content).startswith(history_hash(turn.question))


async def audit(
    redis: Redis,
    keys: Keys,
    turns: Sequence[Turn],
    run: str,
    right: Callable[[Turn, Reply], bool] = answers_history,
) -> Audit:
    """Look at turns of one model, all asked for by `run`, after the last has ended. At most as many as the
    stream of finished turns holds (20,000). `right` says whether a reply may be a turn's."""
    model, hashes = turns[0].model, [turn.hash for turn in turns]
    endings = await Store(redis, keys).endings(run, hashes)
    lost = wrong = 0
    for turn in turns:
        ending = endings.get(turn.hash)
        if not isinstance(ending, Reply):
            lost += 1
        elif ending.hash != turn.hash or not right(turn, ending):
            wrong += 1
    told = await _told(redis, keys.finished(model))
    twice = sum(told[hash] > 1 for hash in set(hashes))
    held = set(await redis.zrange(keys.leases(model), 0, -1))
    held |= set(await redis.hkeys(keys.owners(model)))  # type: ignore[misc]
    return Audit(lost, twice, wrong, len(held))


async def _told(redis: Redis, stream: str) -> Counter[str]:
    told: Counter[str] = Counter()
    start = "-"
    while entries := await redis.xrange(stream, min=start, count=STREAM_PAGE):
        told.update(fields[b"h"].decode() for _, fields in entries)
        start = f"({entries[-1][0].decode()}"
    return told
