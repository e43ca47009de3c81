"""Answers kept while they grow."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from itertools import pairwise

import pytest
from redis.asyncio import Redis
from tests.by_hand import ByHand, h
from tests.processes import SimWorker, until_async

from turnmill.client import Client
from turnmill.reply import EngineIdentity, Reply
from turnmill.settings import Farm
from turnmill.turn import Turn
from turnmill_worker.engines.base import EngineSettings, Progress
from turnmill_worker.engines.kept import Part, can_go_on, joined, settled
from turnmill_worker.engines.sim import build, follows
from turnmill_worker.progress import Keeper
from turnmill_worker.side import Running

ENGINE = EngineIdentity(engine="e", version="1", model="m")
OTHER = EngineIdentity(engine="e", version="2", model="m")


def turn(text: str = "Tell me of the mill", **fields: object) -> Turn:
    messages = [{"role": "user", "content": text}]
    return Turn.model_validate({"model": "sim", "messages": messages, **fields})


class Answer:
    """A growing answer, told to Redis by a keeper of its own."""

    def __init__(
        self, by_hand: ByHand, running: Running, identity: EngineIdentity = ENGINE
    ) -> None:
        self.tokens: list[int] = []
        self.running = running
        running.progress.growing = self._part
        self.keeper = Keeper(
            lambda: by_hand.redis, by_hand.keys, by_hand.model, identity, lambda: [running]
        )

    def _part(self, offset: int) -> Part:
        new = self.tokens[offset:]
        return Part(offset, len(new), bytes(new))

    async def grows(self, *tokens: int) -> None:
        self.tokens += tokens
        await self.keeper.keep()

    async def read(self) -> list[int]:
        return joined(await self.keeper.read(self.running.claim.hash), list)


async def growing(by_hand: ByHand, name: str, identity: EngineIdentity = ENGINE) -> Answer:
    claim = await by_hand.hand().take_one(name)
    return Answer(by_hand, Running(claim, Progress()), identity)


async def lapsed(by_hand: ByHand, name: str, identity: EngineIdentity = ENGINE) -> Answer:
    """The turn's next try, after its lease has run out."""
    await by_hand.lapse(h(name))
    return await growing(by_hand, name, identity)


async def test_what_has_grown_is_kept_part_by_part(by_hand: ByHand) -> None:
    await by_hand.enqueue("a")
    answer = await growing(by_hand, "a")
    await answer.grows(1, 2, 3)
    await answer.grows(4)
    await answer.grows()
    assert await answer.read() == [1, 2, 3, 4]
    record = await by_hand.redis.lrange(by_hand.keys.partial(h("a")), 0, -1)
    assert [len(part) for part in record[1:]] == [8 + 3, 8 + 1]  # each token is sent once


async def test_the_next_try_goes_on_from_there_and_says_anew_what_it_dropped(
    by_hand: ByHand,
) -> None:
    await by_hand.enqueue("a")
    await (await growing(by_hand, "a")).grows(1, 2, 3)
    second = await lapsed(by_hand, "a")
    assert await second.read() == [1, 2, 3]
    second.running.progress.resumed_at = 2
    second.tokens = [1, 2]
    await second.grows(7, 8)
    assert await second.read() == [1, 2, 7, 8]


async def test_a_try_that_starts_again_leaves_nothing_of_the_one_before(by_hand: ByHand) -> None:
    await by_hand.enqueue("a")
    await (await growing(by_hand, "a")).grows(1, 2, 3)
    second = await lapsed(by_hand, "a", OTHER)
    assert await second.read() == []  # another engine's
    await second.grows(9)
    assert await second.read() == [9]


async def test_only_the_owner_keeps(by_hand: ByHand) -> None:
    await by_hand.enqueue("a")
    first = await growing(by_hand, "a")
    await first.grows(1)
    second = await lapsed(by_hand, "a")
    second.running.progress.resumed_at = 1
    second.tokens = [1]
    await first.grows(2, 3)
    assert await second.read() == [1]
    await second.grows(4)
    assert await second.read() == [1, 4]


async def test_a_part_that_redis_has_lost_is_sent_again(by_hand: ByHand) -> None:
    await by_hand.enqueue("a")
    answer = await growing(by_hand, "a")
    await answer.grows(1, 2)
    await by_hand.redis.delete(by_hand.keys.partial(h("a")))
    await answer.grows(3)
    await answer.grows(4)
    assert await answer.read() == [1, 2, 3, 4]


async def test_nothing_is_kept_of_a_turn_that_has_ended(by_hand: ByHand) -> None:
    hand = by_hand.hand()
    await by_hand.enqueue("a", "b")
    ends, fails = await hand.take("a", "b")
    for claim, end in ((ends, hand.answer), (fails, hand.fail)):
        answer = Answer(by_hand, Running(claim))
        await answer.grows(1)
        await end(claim)
        await answer.grows(2)
        assert not await by_hand.redis.exists(by_hand.keys.partial(claim.hash))


async def test_a_try_that_kept_new_tokens_is_no_strike(by_hand: ByHand) -> None:
    await by_hand.enqueue("a")
    await (await growing(by_hand, "a")).grows(1, 2)
    second = await lapsed(by_hand, "a")
    assert await by_hand.strikes("a") == 0
    # It starts again, and dies where the first had been: that is not further.
    second.running.progress.resumed_at = 0
    await second.grows(5, 6)
    third = await lapsed(by_hand, "a")
    assert await by_hand.strikes("a") == 1
    third.running.progress.resumed_at = 2
    third.tokens = [5, 6]
    await third.grows(7)
    await lapsed(by_hand, "a")
    assert await by_hand.strikes("a") == 1


# What an engine may go on from


def test_parts_are_joined_up_to_the_first_that_does_not_fit() -> None:
    good = [Part(0, 2, b"ab"), Part(1, 2, b"xy")]
    assert joined(good, list) == list(b"axy")
    for wrong in (Part(4, 1, b"a"), Part(3, 2, b"a")):
        assert joined([*good, wrong, Part(3, 1, b"z")], list) == list(b"axy")
    assert joined([Part(0, 1, b"[7]"), Part(1, 1, b"[8")], json.loads) == [7]


@pytest.mark.parametrize(
    ("text", "stops", "count"),
    [
        ("abc", [], 3),
        ("abc", ["x"], 3),
        ("abc", ["cd"], 2),
        ("abc", ["bcd", "cx"], 1),
        ("ab\N{REPLACEMENT CHARACTER}", [], 2),
        ("\n\n", ["\n\n\n"], 0),
    ],
)
def test_a_stop_string_may_not_begin_in_what_was_kept(
    text: str, stops: list[str], count: int
) -> None:
    assert settled(len(text), lambda n: text[:n], stops) == count


@pytest.mark.parametrize(
    ("fields", "can"),
    [
        ({}, True),
        ({"sampling": {"temperature": 0, "stop": ["x"], "logprobs": True}}, True),
        ({"sampling": {"repetition_penalty": 1.0, "frequency_penalty": 0}}, True),
        ({"tool_choice": "auto", "response_format": {"type": "text"}}, True),
        ({"sampling": {"seed": 1}}, False),
        ({"sampling": {"min_tokens": 4}}, False),
        ({"sampling": {"frequency_penalty": 0.1}}, False),
        ({"sampling": {"presence_penalty": 0.1}}, False),
        ({"sampling": {"repetition_penalty": 1.1}}, False),
        ({"response_format": {"type": "json_object"}}, False),
        ({"tool_choice": "required"}, False),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, False),
    ],
)
def test_what_remembers_its_past_starts_again(fields: dict[str, object], can: bool) -> None:
    assert can_go_on(turn(**fields)) is can


async def test_the_scripted_engine_goes_on_from_what_was_kept() -> None:
    engine = build(
        EngineSettings(arguments=("--answer", "chain", "--answer-tokens", "40", "--context", "99"))
    )
    first = Progress()
    whole = await engine.answer(turn(), "r1", first)
    assert first.growing is not None
    assert first.growing(38).length == 2
    early = first.growing(0)
    again = Progress(kept=[Part(0, 7, json.dumps(json.loads(early.data)[:7]).encode())])
    answer = await engine.answer(turn(), "r2", again)
    assert again.resumed_at == 7
    assert answer == whole


# Whole workers


def chained(reply: Reply) -> int:
    """How many tokens an answer has, if it is of one piece."""
    tokens = str(reply.message.content).split()
    for one, next_one in pairwise(tokens):
        assert follows(one) == next_one, "two answers are mixed"
    return len(tokens)


CHAIN = ("--answer", "chain", "--answer-tokens", "400", "--tokens-per-second", "100")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_worker_goes_on_where_another_was(
    worker: Callable[..., SimWorker], farm: Farm, client: Redis, number: signal.Signals
) -> None:
    async with Client(farm.url, namespace=farm.namespace) as asking:
        asked = [turn(f"turn {number}") for number in range(20)]
        first = worker("--keep-every", "0.2", "--drain", "0", sim=CHAIN)
        hashes = await asking.submit_many(asked)

        async def kept() -> bool:
            counts = [await client.hget(f"{farm.keys.prefix}t:{h}", "kept") for h in hashes]
            return all(int(count or 0) > 100 for count in counts)

        await until_async(kept, "much of every answer is kept")
        first.signal(number)
        assert first.wait() == (0 if number == signal.SIGTERM else -number)
        worker("--keep-every", "0.2", sim=CHAIN)
        endings = await asking.wait_many(hashes, timeout=30)
        for hash, ending in endings.items():
            assert isinstance(ending, Reply)
            assert chained(ending) == 400
            assert ending.usage.completion_tokens == 400
            trace = await asking.trace(hash)
            assert trace is not None
            assert (trace.resumed_at or 0) > 100
            assert not await client.exists(farm.keys.partial(hash))


async def test_what_may_not_go_on_starts_again(
    worker: Callable[..., SimWorker], farm: Farm, client: Redis
) -> None:
    async with Client(farm.url, namespace=farm.namespace) as asking:
        first = worker("--keep-every", "0.1", sim=CHAIN)
        seeded = await asking.submit(turn(sampling={"seed": 1}))
        other = await asking.submit(turn())
        await until_async(
            lambda: client.exists(farm.keys.partial(other)), "the other answer is kept"
        )
        first.kill()
        worker("--keep-every", "0.1", sim=CHAIN)
        ending = await asking.wait(seeded, timeout=30)
        trace = await asking.trace(seeded)
    assert isinstance(ending, Reply)
    assert chained(ending) == 400
    assert trace is not None
    assert [entry.outcome for entry in trace.earlier] == ["lapse"]
    assert trace.resumed_at is None
