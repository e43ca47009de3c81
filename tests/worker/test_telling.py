"""What readers are told of answers that grow: the scripts, and a worker's side of them."""

from __future__ import annotations

import asyncio

import pytest
from tests.by_hand import ByHand, Hand, h
from tests.processes import until_async

from turnmill.reply import EngineIdentity
from turnmill.tasks import end_tasks
from turnmill_worker.claim import Claim
from turnmill_worker.engines.base import Progress
from turnmill_worker.engines.kept import Part
from turnmill_worker.progress import Keeper
from turnmill_worker.scripts import RENEW
from turnmill_worker.side import Running

ENGINE = EngineIdentity(engine="e", version="1", model="m")


class Told:
    """An answer that grows in the hands of one try: a token is a character."""

    def __init__(self, by_hand: ByHand, hand: Hand, claim: Claim, text: str = "") -> None:
        self.hand, self.claim, self.text = hand, claim, text
        self.running = Running(claim, Progress(resumed_at=len(text)))
        self.progress = self.running.progress
        self.progress.growing, self.progress.telling = self._part, lambda have: self.text[have:]
        self.progress.now_sent()
        self.keeper = Keeper(
            lambda: by_hand.redis, by_hand.keys, by_hand.model, ENGINE, lambda: [self.running]
        )
        self._farm = by_hand

    def _part(self, offset: int) -> Part:
        new = self.text[offset:]
        return Part(offset, len(new), new.encode())

    async def begin(self) -> None:
        self.keeper.stream(self.running)
        assert self.running.teller is not None
        self.running.teller.earlier = await self.keeper.read_told(self.claim.hash)

    async def says(self, text: str) -> None:
        self.text += text
        await self.keeper.keep()


async def told_of(farm: ByHand, name: str) -> str | None:
    """What a late reader finds."""
    text = await farm.redis.get(farm.keys.told_of(h(name)))
    return None if text is None else text[24:].decode()


async def heard(farm: ByHand, name: str) -> list[tuple[str, int, str]]:
    """What a reader has heard: line, position, text."""
    found = []
    for _, entry in await farm.redis.xrange(farm.keys.told(farm.model)):
        if (value := entry.get(h(name).encode())) is not None:
            at, _, text = value[24:].partition(b" ")
            found.append((value[:24].decode(), int(at), text.decode()))
    return found


async def telling(farm: ByHand, name: str, text: str = "") -> Told:
    hand = farm.hand()
    one = Told(farm, hand, await hand.take_one(name), text)
    await one.begin()
    return one


async def test_the_worker_learns_with_the_claim_that_somebody_reads_along(by_hand: ByHand) -> None:
    await by_hand.enqueue("read", stream=True)
    await by_hand.enqueue("not")
    claims = await by_hand.hand().take("read", "not")
    assert [claim.stream for claim in claims] == [True, False]
    assert [claim.company for claim in claims] == ["-", "-"]


async def test_the_next_try_and_a_suspects_trial_know_it_too(by_hand: ByHand) -> None:
    await by_hand.enqueue("a", stream=True)
    for company in ("-", "-", "!"):
        hand = by_hand.hand()
        (claim,) = (await hand.claim(1, holding=0)).claims
        assert (claim.stream, claim.company) == (True, company)
        await hand.give_back(claim, "death")


async def test_a_worker_hears_at_its_renewal_of_who_joins_a_turn_that_runs(
    by_hand: ByHand,
) -> None:
    hand, other = by_hand.hand(), by_hand.hand()
    await by_hand.enqueue("a", "b")
    (claim,), (others,) = await hand.take("a"), await other.take("b")

    async def named(claim: Claim) -> list[str]:
        answer = await by_hand.script(RENEW, claim.hash, claim.token)
        return [hash.decode() for hash in answer[3]]

    assert await named(claim) == []
    await by_hand.enqueue("a", stream=True, run="joins")
    assert await named(claim) == [h("a")]
    assert await named(claim) == [h("a")]  # its answer may have been lost
    assert await named(others) == []
    await by_hand.redis.delete(f"{by_hand.prefix}asked:{hand.id}")
    await by_hand.enqueue("a", stream=True, run="joins", fresh=False)  # polls mend it
    assert await named(claim) == [h("a")]


async def test_text_is_told_once_and_read_whole_by_who_comes_late(by_hand: ByHand) -> None:
    await by_hand.enqueue("a", stream=True)
    one = await telling(by_hand, "a")
    for text in ("Wie ", "", "schön ", "ist es"):
        await one.says(text)
    token = one.claim.token
    assert await heard(by_hand, "a") == [
        (token, 0, "Wie "),
        (token, 4, "schön "),
        (token, 11, "ist es"),
    ]
    assert await told_of(by_hand, "a") == "Wie schön ist es"


async def test_nothing_is_told_of_turns_that_nobody_reads(by_hand: ByHand) -> None:
    hand = by_hand.hand()
    await by_hand.enqueue("a")
    one = Told(by_hand, hand, await hand.take_one("a"))
    await one.says("text")
    assert await told_of(by_hand, "a") is None
    assert not await by_hand.redis.exists(by_hand.keys.told(by_hand.model))
    await one.begin()  # by now somebody does
    await one.says("")
    assert await told_of(by_hand, "a") == "text"


async def test_only_what_is_kept_is_told(by_hand: ByHand) -> None:
    await by_hand.enqueue("a", stream=True)
    one = await telling(by_hand, "a")
    await one.says("one ")
    await by_hand.redis.delete(by_hand.keys.partial(h("a")))  # Redis has lost it
    await one.says("two ")
    assert await told_of(by_hand, "a") == "one "
    await one.says("three")
    assert await told_of(by_hand, "a") == "one two three"
    assert "".join(text for _, _, text in await heard(by_hand, "a")) == "one two three"
    assert await by_hand.redis.hget(by_hand.keys.tries(h("a")), "kept") == b"13"


async def test_first_words_do_not_wait_for_the_next_telling(
    by_hand: ByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnmill_worker.progress.TELL_SECONDS", 1000.0)
    await by_hand.enqueue("a", "b", stream=True)
    one = await telling(by_hand, "a")
    hand = by_hand.hand()
    two = Told(by_hand, hand, await hand.take_one("b"))
    one.keeper.stream(two.running)
    assert two.running.teller is not None
    two.running.teller.earlier = await one.keeper.read_told(h("b"))
    task = asyncio.ensure_future(one.keeper.tell())
    try:
        for told, name in ((one, "a"), (two, "b")):
            told.text = "first "
            told.progress.moved(1)
            await until_async(lambda name=name: told_of(by_hand, name), "its first words are told")
            assert await told_of(by_hand, name) == "first "
    finally:
        await end_tasks([task])


async def test_text_that_redis_has_lost_is_told_again(by_hand: ByHand) -> None:
    await by_hand.enqueue("a", stream=True)
    one = await telling(by_hand, "a")
    await one.says("one ")
    await by_hand.redis.delete(by_hand.keys.told_of(h("a")))
    await one.says("two ")
    await one.says("three")
    assert await told_of(by_hand, "a") == "one two three"


async def test_the_next_try_goes_on_with_the_line(by_hand: ByHand) -> None:
    await by_hand.enqueue("a", stream=True)
    first = await telling(by_hand, "a")
    await first.says("one ")
    await by_hand.lapse(h("a"))
    second = await telling(by_hand, "a", "one ")
    await second.says("two")
    line = first.claim.token
    assert await heard(by_hand, "a") == [(line, 0, "one "), (line, 4, "two")]
    await by_hand.lapse(h("a"))
    third = await telling(by_hand, "a", "one two")
    await third.says(" three")
    assert await told_of(by_hand, "a") == "one two three"
    assert {line for line, _, _ in await heard(by_hand, "a")} == {first.claim.token}


@pytest.mark.parametrize("untold", [False, True])
async def test_a_try_that_begins_again_breaks_the_line(by_hand: ByHand, untold: bool) -> None:
    await by_hand.enqueue("a", stream=True)
    first = await telling(by_hand, "a")
    await first.says("one two")
    await by_hand.lapse(h("a"))
    second = await telling(by_hand, "a", "" if untold else "One")
    if untold:
        second.progress.telling = None  # another engine, that is not for streaming
    await second.says(" more")
    told = ("", 0) if untold else ("One more", 8)
    assert (await heard(by_hand, "a"))[1:] == [(second.claim.token, 0, told[0])]
    assert await told_of(by_hand, "a") == (told[0] or None)
    if not untold:
        await second.says("!")
        assert (await heard(by_hand, "a"))[2:] == [(second.claim.token, told[1], "!")]


async def test_who_has_lost_the_turn_tells_nothing(by_hand: ByHand) -> None:
    await by_hand.enqueue("a", stream=True)
    first = await telling(by_hand, "a")
    await first.says("one ")
    await by_hand.lapse(h("a"))
    second = await telling(by_hand, "a", "one ")
    await first.says("TWO")
    await second.says("two")
    assert await told_of(by_hand, "a") == "one two"


async def test_a_turn_that_was_told_is_finished_by_its_owner_only(by_hand: ByHand) -> None:
    await by_hand.enqueue("a", stream=True)
    await by_hand.enqueue("plain")
    first = await telling(by_hand, "a")
    plain = await first.hand.take_one("plain")
    await first.says("one ")
    await by_hand.lapse(h("a"), h("plain"))
    second = await telling(by_hand, "a", "one ")
    (other,) = await second.hand.take("plain")
    assert await first.hand.answer(first.claim, "one 2") == 0
    assert await by_hand.store.reply(h("a")) is None
    assert (await second.hand.renew())[0] == []  # it is still hers
    await second.says("two")
    assert await second.hand.answer(second.claim, "one two") == 1
    reply = await by_hand.store.reply(h("a"))
    assert reply is not None
    assert reply.message.content == "one two"
    assert await by_hand.counts() == (2, 1, 0, 0)
    # Of the others the first answer wins, whoever brings it.
    assert await first.hand.answer(plain) == 1
    assert await second.hand.answer(other) == 0


async def test_a_lapsed_owner_that_nobody_has_replaced_may_finish(by_hand: ByHand) -> None:
    await by_hand.enqueue("a", stream=True)
    one = await telling(by_hand, "a")
    await one.says("one ")
    await by_hand.lapse(h("a"))
    await by_hand.hand().renew()  # its lease is reaped
    assert await one.hand.answer(one.claim, "one two") == 1


async def test_a_turn_that_was_asked_for_but_not_told_is_finished_by_the_first(
    by_hand: ByHand,
) -> None:
    await by_hand.enqueue("a", stream=True)
    hand = by_hand.hand()
    first = await hand.take_one("a")
    await by_hand.lapse(h("a"))
    await telling(by_hand, "a")
    assert await hand.answer(first) == 1


async def test_nothing_is_left_of_what_was_told(by_hand: ByHand) -> None:
    await by_hand.enqueue("answered", "failed", "left", stream=True)
    for name in ("answered", "failed", "left"):
        one = await telling(by_hand, name)
        await one.says("text")
        assert await told_of(by_hand, name) == "text"
        if name == "answered":
            await one.hand.answer(one.claim, "text")
        elif name == "failed":
            await one.hand.fail(one.claim)
        else:
            await by_hand.cancel(name)
            await one.hand.let_go(one.claim)
        await one.says("more")
        assert await told_of(by_hand, name) is None
        assert not await by_hand.redis.exists(by_hand.keys.tries(h(name)))
    ttl = await by_hand.redis.pttl(by_hand.keys.told(by_hand.model))
    assert 0 < ttl <= 60_000


async def test_asked_again_after_a_failure_it_begins_another_line(by_hand: ByHand) -> None:
    await by_hand.enqueue("a", stream=True)
    first = await telling(by_hand, "a")
    await first.says("one")
    await first.hand.fail(first.claim)
    await by_hand.enqueue("a", stream=True)
    second = await telling(by_hand, "a")
    await second.says("two")
    assert [line for line, _, _ in await heard(by_hand, "a")] == [
        first.claim.token,
        second.claim.token,
    ]
