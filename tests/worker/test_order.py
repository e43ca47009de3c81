"""Who is served when, exactly: the scripts called directly, a turn's place being the number of claims before it."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.by_hand import ByHand, Hand, h

from turnmill.queue import BATCH_TURNS

MANY = 10_000
SLOTS = 8


def turns(run: str, count: int) -> list[str]:
    return [f"{run}{i}" for i in range(count)]


async def enqueue(by_hand: ByHand, run: str, count: int, **how: float) -> list[str]:
    names = turns(run, count)
    for start in range(0, count, BATCH_TURNS):
        await by_hand.enqueue(*names[start : start + BATCH_TURNS], run=run, **how)  # type: ignore[arg-type]
    return names


async def claims_until(hand: Hand, wanted: list[str], want: int = SLOTS) -> tuple[list[str], int]:
    """Claims until all wanted turns are claimed. Returns the other turns that came before the last of them, and
    how many calls brought nothing although more was ready."""
    left, others, empty = {h(name) for name in wanted}, list[str](), 0
    while left:
        taken = await hand.claim(want, holding=SLOTS)
        assert taken.claims or taken.more, "nothing is ready, and not all were claimed"
        empty += not taken.claims
        for hash in taken.hashes:
            if hash in left:
                left.discard(hash)
            elif left:
                others.append(hash)
    return others, empty


async def leave_all_but_ten(by_hand: ByHand, run: str, names: list[str], step: int) -> list[str]:
    """The run leaves its turns, but for ten: each `step`-th from the last."""
    kept = names[::-1][::step][:10]
    gone = [name for name in names if name not in set(kept)]
    for start in range(0, len(gone), BATCH_TURNS):
        await by_hand.cancel(*gone[start : start + BATCH_TURNS], run=run)
    return kept


@pytest.mark.parametrize("want", [1, SLOTS])
async def test_ten_turns_beside_ten_thousand(by_hand: ByHand, want: int) -> None:
    await enqueue(by_hand, "large", MANY)
    hand = by_hand.hand()
    await hand.claim(300)
    small = await enqueue(by_hand, "small", 10)
    others, _ = await claims_until(hand, small, want)
    assert len(others) <= 10 + 1


async def test_ten_turns_beside_many_runs_get_their_share(by_hand: ByHand) -> None:
    for number in range(20):
        await enqueue(by_hand, f"large-{number}-", 100)
    hand = by_hand.hand()
    await hand.claim(300)
    small = await enqueue(by_hand, "small", 10)
    others, _ = await claims_until(hand, small)
    assert len(others) <= 20 * 10 + 20


@pytest.mark.parametrize("step", [1, 1000], ids=["the last ten", "ten among them"])
async def test_what_a_run_has_left_holds_up_nobody(by_hand: ByHand, step: int) -> None:
    """Neither the ten turns that it still wants, nor those of another run."""
    await enqueue(by_hand, "large", MANY)
    hand = by_hand.hand()
    await hand.claim(300)
    names = await enqueue(by_hand, "left", MANY)
    kept = await leave_all_but_ten(by_hand, "left", names, step)
    small = await enqueue(by_hand, "small", 10)
    others, empty = await claims_until(hand, kept + small)
    assert len(others) <= 10 + 2
    assert empty <= 20


async def test_turns_that_others_were_answered_hold_up_nobody(by_hand: ByHand) -> None:
    hand = by_hand.hand()
    names = await enqueue(by_hand, "first", 3000)
    await enqueue(by_hand, "same", 0)
    for start in range(0, 3000, BATCH_TURNS):
        await by_hand.enqueue(*names[start : start + BATCH_TURNS], run="same")
    while (taken := await hand.claim(500, holding=1)).claims:
        for claim in taken.claims:
            await hand.answer(claim)
    await by_hand.enqueue(*turns("same", 10), run="same")
    small = await enqueue(by_hand, "small", 10)
    _, empty = await claims_until(hand, small + turns("same", 10))
    assert empty == 0


async def test_a_run_that_is_cancelled_whole_holds_up_nobody(by_hand: ByHand) -> None:
    await enqueue(by_hand, "left", MANY)
    assert await by_hand.cancel(run="left") == MANY
    small = await enqueue(by_hand, "small", 10)
    assert await claims_until(by_hand.hand(), small) == ([], 0)


async def test_a_shared_turn_outlives_the_hints_of_the_run_that_is_cancelled(
    by_hand: ByHand,
) -> None:
    """The only hint was in the list of the run that left."""
    hand = by_hand.hand()
    await by_hand.enqueue("a", run="left")
    claim = await hand.take_one("a")
    await by_hand.enqueue("a", run="stays")
    await hand.give_back(claim)
    await by_hand.cancel(run="left")
    await hand.renew()
    await hand.take_one("a")


async def test_ten_turns_beside_conversations_that_never_run_dry(by_hand: ByHand) -> None:
    await by_hand.enqueue(*turns("new", 100), run="talks")
    hand, asked = by_hand.hand(), 0
    await hand.claim(SLOTS)
    small = await enqueue(by_hand, "small", 10)
    left, others = {h(name) for name in small}, 0
    while left:
        going = [f"talk{asked + i}" for i in range(2 * SLOTS)]
        asked += len(going)
        await by_hand.enqueue(*going, run="talks", going=True)
        taken = set((await hand.claim(SLOTS)).hashes)
        others += len(taken - left)
        left -= taken
    assert others <= 10 + SLOTS


async def test_a_run_with_a_turn_at_a_time_gets_each_at_its_turn(by_hand: ByHand) -> None:
    await enqueue(by_hand, "large", 1000)
    hand = by_hand.hand()
    await hand.claim(100)
    for number in range(50):
        await by_hand.enqueue(f"step{number}", run="slow", going=True)
        others, _ = await claims_until(hand, [f"step{number}"], want=1)
        assert len(others) <= 2


@pytest.mark.parametrize("want", [1, 3, 50])
@pytest.mark.parametrize("weights", [(2.0, 1.0), (1.0, 0.5), (5.0, 2.5)])
async def test_twice_the_weight_gets_twice_the_turns(
    by_hand: ByHand, weights: tuple[float, float], want: int
) -> None:
    heavy = set(map(h, await enqueue(by_hand, "heavy", 400, weight=weights[0])))
    await enqueue(by_hand, "light", 400, weight=weights[1])
    hand, served = by_hand.hand(), Counter[bool]()
    while served.total() < 450:
        taken = await hand.claim(want)
        served.update(hash in heavy for hash in taken.hashes)
    assert abs(served[True] - 2 * served[False]) <= 10


async def test_every_class_that_waits_is_served_after_its_time(by_hand: ByHand) -> None:
    """While the largest never runs dry; and then again only when it has waited as long again."""
    for priority in (9, 5, 1):
        await enqueue(by_hand, f"class{priority}-", 300, priority=priority)
    hand, busy = by_hand.hand(), set(map(h, turns("class9-", 300)))
    assert set((await hand.claim(SLOTS)).hashes) <= busy
    for waited, served in ((29_000, 0), (31_000, 1)):
        for priority in ("5", "1"):
            since = await by_hand.now() - waited
            await by_hand.redis.hset(by_hand.keys.classes(by_hand.model), priority, since)  # type: ignore[misc]
        taken = set((await hand.claim(SLOTS)).hashes)
        for priority in (5, 1):
            assert len(taken & set(map(h, turns(f"class{priority}-", 300)))) == served
    assert set((await hand.claim(SLOTS)).hashes) <= busy


async def test_runs_of_a_class_are_fair_whatever_the_other_classes_do(by_hand: ByHand) -> None:
    hand = by_hand.hand()
    one = set(map(h, await enqueue(by_hand, "one", 200, priority=3)))
    await hand.claim(50)
    await enqueue(by_hand, "above", 100, priority=7)
    await enqueue(by_hand, "two", 200, priority=3)
    await hand.claim(100)
    taken = (await hand.claim(40)).hashes
    assert len(taken) == 40
    assert 19 <= len(one & set(taken)) <= 21
