"""The queue's scripts, called directly: no process, no waiting, every clock set by hand."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import pytest
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError, ResponseError
from tests.by_hand import ByHand, Hand, h
from tests.processes import ValkeyServer

from turnmill.reply import Failure, Reply
from turnmill.settings import Farm
from turnmill_worker.claim import Company, Finish
from turnmill_worker.scripts import FINISH

# What an ask finds


async def test_a_fresh_ask_is_queued_then_running_then_answered(by_hand: ByHand) -> None:
    hand = by_hand.hand()
    assert await by_hand.enqueue("a") == ["queued"]
    claim = await hand.take_one("a")
    assert claim.body == b"a"
    assert await by_hand.enqueue("a") == ["running"]
    assert await hand.answer(claim) == 1
    assert await by_hand.enqueue("a") == ["answered"]
    assert await by_hand.finished() == [h("a")]


async def test_states_are_in_the_order_of_the_asks(by_hand: ByHand) -> None:
    hand = by_hand.hand()
    await by_hand.enqueue("a", "b", "c")
    a, b = await hand.take("a", "b")
    await hand.answer(a)
    await hand.fail(b, "invalid_request")
    states = await by_hand.enqueue("d", "c", "b", "a")
    assert states == ["queued", "queued", "failed", "answered"]


async def test_a_poll_of_what_nobody_knows_asks_for_the_body(by_hand: ByHand) -> None:
    assert await by_hand.poll("a") == ["unknown"]
    assert not await by_hand.store.runs()
    assert await by_hand.enqueue("a", fresh=False, body=b"a") == ["queued"]
    assert (await by_hand.hand().take_one("a")).body == b"a"


async def test_a_poll_puts_back_a_lost_waiter(by_hand: ByHand) -> None:
    await by_hand.enqueue("a")
    assert await by_hand.poll("a", run="other") == ["queued"]
    claim = await by_hand.hand().take_one("a")
    await by_hand.hand().answer(claim)
    assert await by_hand.counts("other") == (1, 1, 0, 0)


async def test_a_poll_undoes_neither_cancel_nor_failure_nor_deadline(by_hand: ByHand) -> None:
    hand = by_hand.hand()
    await by_hand.enqueue("a", "b")
    await by_hand.enqueue("c", deadline=0.001)
    await by_hand.cancel("a")
    await by_hand.redis.zadd(f"{by_hand.prefix}deadlines", {h("c") + "run": 1})
    await hand.renew()
    await hand.fail(await hand.take_one("b"))
    assert await by_hand.poll("a", "b", "c") == ["cancelled", "failed", "deadline"]
    assert not (await hand.claim()).claims
    assert await by_hand.counts() == (3, 0, 2, 1)


async def test_asked_afresh_everything_is_queued_again(by_hand: ByHand) -> None:
    hand = by_hand.hand()
    await by_hand.enqueue("a", "b")
    await by_hand.enqueue("c", deadline=100)
    await by_hand.cancel("a")
    await by_hand.redis.zadd(f"{by_hand.prefix}deadlines", {h("c") + "run": 1})
    await hand.renew()
    await hand.fail(await hand.take_one("b"))
    assert await by_hand.enqueue("a", "b", "c") == ["queued"] * 3
    assert await by_hand.counts() == (3, 0, 0, 0)
    taken = await hand.claim()
    assert sorted(taken.hashes) == sorted(map(h, "abc"))
    for claim in taken.claims:
        await hand.answer(claim)
    assert await by_hand.counts() == (3, 3, 0, 0)


@pytest.mark.parametrize("kind", ["invalid_request", "poison"])
async def test_what_failed_for_good_stays_until_it_is_retried_on_purpose(
    by_hand: ByHand, kind: str
) -> None:
    hand = by_hand.hand()
    await by_hand.enqueue("a")
    await hand.fail(await hand.take_one("a"), kind)  # type: ignore[arg-type]
    assert await by_hand.enqueue("a") == ["failed"]
    assert not (await hand.claim()).claims
    assert await by_hand.enqueue("a", retry_failed=True) == ["queued"]
    await hand.answer(await hand.take_one("a"))
    assert await by_hand.counts() == (1, 1, 0, 0)


async def test_an_earlier_failure_is_kept_with_the_turn(by_hand: ByHand) -> None:
    hand = by_hand.hand()
    await by_hand.enqueue("a")
    await hand.fail(await hand.take_one("a"))
    await by_hand.enqueue("a")
    (record,) = await by_hand.redis.lrange(f"{by_hand.keys.prefix}y:{h('a')}", 0, -1)
    assert Failure.model_validate_json(record).kind == "engine_error"


async def test_counters_of_a_run_count_a_turn_once(by_hand: ByHand) -> None:
    hand = by_hand.hand()
    for _ in range(3):
        await by_hand.enqueue("a", "a", "b")
        await by_hand.poll("a", "b")
    for claim in await hand.take("a", "b"):
        assert await hand.answer(claim) == 1
        assert await hand.answer(claim) == 0
    await by_hand.enqueue("a", "b")
    await by_hand.enqueue("a", run="late")
    assert await by_hand.counts() == (2, 2, 0, 0)
    assert await by_hand.counts("late") == (1, 1, 0, 0)


# Who is served


async def test_conversations_that_are_going_come_before_new_ones(by_hand: ByHand) -> None:
    await by_hand.enqueue("new1", "new2")
    await by_hand.enqueue("going1", "going2", going=True)
    hand = by_hand.hand()
    await hand.take("going1", "going2", "new1", "new2")


async def test_runs_share_by_weight(by_hand: ByHand) -> None:
    heavy, light = [f"h{i}" for i in range(60)], [f"l{i}" for i in range(60)]
    await by_hand.enqueue(*heavy, run="heavy", weight=3)
    await by_hand.enqueue(*light, run="light", weight=1)
    hand, served = by_hand.hand(), Counter[bool]()
    for _ in range(10):
        taken = await hand.claim(4)
        served.update(hash in {h(name) for name in heavy} for hash in taken.hashes)
    assert served.total() == 40
    assert 28 <= served[True] <= 32


async def test_a_large_run_does_not_hold_up_a_small_one(by_hand: ByHand) -> None:
    await by_hand.enqueue(*(f"l{i}" for i in range(200)), run="large")
    hand = by_hand.hand()
    await hand.claim(50)
    await by_hand.enqueue("s", run="small")
    taken = await hand.claim(2)
    assert h("s") in taken.hashes


async def test_who_was_away_has_saved_up_nothing(by_hand: ByHand) -> None:
    await by_hand.enqueue("b0", run="back")
    hand = by_hand.hand()
    await hand.claim(5)
    await by_hand.enqueue(*(f"s{i}" for i in range(100)), run="steady")
    await hand.claim(50)
    back = [f"b{i}" for i in range(1, 21)]
    await by_hand.enqueue(*back, run="back")
    taken = await hand.claim(20)
    of_back = len({h(name) for name in back} & set(taken.hashes))
    assert 9 <= of_back <= 11


async def test_larger_priorities_come_first(by_hand: ByHand) -> None:
    await by_hand.enqueue("low", run="low", priority=2)
    await by_hand.enqueue("high", run="high", priority=8)
    await by_hand.enqueue("middle", run="middle", priority=5)
    await by_hand.hand().take("high", "middle", "low")


async def test_a_class_that_starves_gets_a_share(by_hand: ByHand) -> None:
    await by_hand.enqueue(*(f"h{i}" for i in range(100)), run="high", priority=8)
    await by_hand.enqueue(*(f"l{i}" for i in range(10)), run="low", priority=2)
    hand, low = by_hand.hand(), {h(f"l{i}") for i in range(10)}
    assert not low & set((await hand.claim(16)).hashes)
    await by_hand.redis.hset(by_hand.keys.classes("m"), "2", await by_hand.now() - 31_000)
    assert len(low & set((await hand.claim(16)).hashes)) == 2
    assert not low & set((await hand.claim(16)).hashes)


async def test_a_claim_is_bounded_and_says_that_there_is_more(by_hand: ByHand) -> None:
    await by_hand.enqueue(*(f"t{i}" for i in range(7)))
    hand = by_hand.hand()
    taken = await hand.claim(5)
    assert (len(taken.claims), taken.more) == (5, True)
    taken = await hand.claim(5)
    assert len(taken.claims) == 2
    assert not (await hand.claim(5)).more


async def test_a_claim_brings_bounded_bytes_but_always_the_first(by_hand: ByHand) -> None:
    for name in ("a", "b", "c"):
        await by_hand.enqueue(name, body=name.encode() * 1000)
    hand = by_hand.hand()
    taken = await hand.claim(10, room=2500)
    assert (taken.hashes, taken.more) == ([h("a"), h("b")], True)
    assert (await hand.claim(10, room=10)).hashes == [h("c")]


async def test_a_turn_is_held_by_one_worker(by_hand: ByHand) -> None:
    await by_hand.enqueue("a", "b")
    await by_hand.enqueue("b", "a", run="other")
    first, second = by_hand.hand(), by_hand.hand()
    taken = [*(await first.claim(1)).hashes, *(await second.claim(5)).hashes]
    assert sorted(taken) == sorted([h("a"), h("b")])
    assert not (await first.claim(5)).claims


async def test_an_idle_worker_is_woken_and_wakes_the_next(by_hand: ByHand) -> None:
    wake = by_hand.keys.wake("m")
    await by_hand.enqueue("a", "b", "c")
    await by_hand.enqueue("d")
    assert await by_hand.redis.lrange(wake, 0, -1) == [b"1"]
    await by_hand.redis.delete(wake)
    await by_hand.hand().claim(1)
    assert await by_hand.redis.llen(wake) == 1
    await by_hand.redis.delete(wake)
    hand = by_hand.hand()
    while (await hand.claim(5)).more:
        await by_hand.redis.delete(wake)
    assert await by_hand.redis.llen(wake) == 0


# Leases


async def test_a_lease_is_renewed(by_hand: ByHand) -> None:
    await by_hand.redis.set(by_hand.keys.lease, 5000)
    await by_hand.enqueue("a")
    hand, leases = by_hand.hand(), by_hand.keys.leases("m")
    await hand.take_one("a")
    before = await by_hand.redis.zscore(leases, h("a"))
    assert 4000 < before - await by_hand.now() <= 5000
    await by_hand.redis.zadd(leases, {h("a"): before - 3000})
    assert await hand.renew() == ([], [], False)
    assert await by_hand.redis.zscore(leases, h("a")) >= before


async def test_a_lapsed_turn_goes_to_another_with_a_strike(by_hand: ByHand) -> None:
    await by_hand.enqueue("a")
    first, second = by_hand.hand(), by_hand.hand()
    await first.take_one("a")
    await by_hand.lapse(h("a"))
    claim = await second.take_one("a")
    assert await by_hand.strikes("a") == 1
    assert [(one.worker, one.outcome) for one in claim.earlier] == [(first.id, "lapse")]
    assert await first.renew() == ([h("a")], [], False)


async def test_who_is_late_but_not_replaced_takes_back_lease_and_strike(by_hand: ByHand) -> None:
    await by_hand.enqueue("a")
    hand = by_hand.hand()
    claim = await hand.take_one("a")
    await by_hand.lapse(h("a"))
    await by_hand.hand().claim(0)
    assert await by_hand.strikes("a") == 1
    assert await hand.renew() == ([], [], False)
    assert await by_hand.strikes("a") == 0
    assert not (await by_hand.hand().claim()).claims
    assert await hand.answer(claim) == 1


async def test_a_suspect_that_is_taken_back_is_no_suspect(by_hand: ByHand) -> None:
    await by_hand.enqueue("a")
    await by_hand.strike("a", times=1)
    hand, other = by_hand.hand(), by_hand.hand()
    await hand.take_one("a")
    await by_hand.lapse(h("a"))
    await other.renew()
    assert (await by_hand.queue.depth("m")).suspects == 1
    assert await hand.renew() == ([], [], False)
    assert (await by_hand.queue.depth("m")).suspects == 0
    assert await by_hand.strikes("a") == 1


async def test_after_an_outage_every_lease_is_full_and_nobody_is_struck(by_hand: ByHand) -> None:
    await by_hand.enqueue("a", "b")
    first, second = by_hand.hand(), by_hand.hand()
    await first.take("a", "b")
    await by_hand.lapse(h("a"), h("b"))
    await by_hand.seen(ago=6_000)
    assert not (await second.claim()).claims
    assert await by_hand.strikes("a") == 0
    lease = await by_hand.redis.zscore(by_hand.keys.leases("m"), h("a"))
    assert lease > await by_hand.now() + 9_000
    assert await first.renew() == ([], [], False)


async def test_a_clock_that_went_back_takes_no_lease(by_hand: ByHand) -> None:
    await by_hand.enqueue("a")
    first, second = by_hand.hand(), by_hand.hand()
    await first.take_one("a")
    leases = by_hand.keys.leases("m")
    await by_hand.redis.zadd(leases, {h("a"): await by_hand.now() + 3_600_000})
    await by_hand.seen(ago=-3_600_000)
    assert not (await second.claim()).claims
    # Not held for the hour by which the clock went back, either.
    assert await by_hand.redis.zscore(leases, h("a")) < await by_hand.now() + 11_000


async def test_many_lapsed_leases_are_reaped_in_bounded_calls(by_hand: ByHand) -> None:
    names = [f"t{i}" for i in range(150)]
    await by_hand.enqueue(*names)
    hand = by_hand.hand()
    await hand.claim(150)
    await by_hand.lapse(*map(h, names))
    other = by_hand.hand()
    assert (await other.renew())[2]
    assert (await by_hand.queue.depth("m")).running == 50
    assert not (await other.renew())[2]
    assert (await by_hand.queue.depth("m")).running == 0


# Who may say how a turn ends


async def test_the_first_answer_wins_whoever_brings_it(by_hand: ByHand) -> None:
    await by_hand.enqueue("a")
    first, second = by_hand.hand(), by_hand.hand()
    late = await first.take_one("a")
    await by_hand.lapse(h("a"))
    current = await second.take_one("a")
    assert await first.answer(late, "first") == 1
    assert await second.answer(current, "second") == 0
    reply = await by_hand.store.reply(h("a"))
    assert reply is not None
    assert reply.message.content == "first"
    trace = await by_hand.store.trace(h("a"))
    assert trace is not None
    assert trace.worker == first.id
    assert await by_hand.counts() == (1, 1, 0, 0)
    assert await by_hand.queue.depth("m") == await by_hand.queue.depth("nothing")
    second.held[h("a")] = current
    assert (await second.renew())[0] == [h("a")]


async def test_a_reply_replaces_a_failure_never_the_reverse(by_hand: ByHand) -> None:
    await by_hand.enqueue("a")
    first, second = by_hand.hand(), by_hand.hand()
    late = await first.take_one("a")
    await by_hand.lapse(h("a"))
    current = await second.take_one("a")
    assert await second.fail(current) == 1
    assert await by_hand.counts() == (1, 0, 1, 0)
    assert await first.answer(late) == 1
    assert await by_hand.counts() == (1, 1, 0, 0)
    assert await second.fail(current) == 0
    assert isinstance((await by_hand.store.endings("run", [h("a")]))[h("a")], Reply)


async def test_a_foreign_token_ends_nothing(by_hand: ByHand) -> None:
    await by_hand.enqueue("a")
    first, second = by_hand.hand(), by_hand.hand()
    old = await first.take_one("a")
    await by_hand.lapse(h("a"))
    current = await second.take_one("a")
    assert await first.fail(old) == 0
    assert await first.give_back(old) == 0
    assert await first.give_back(old, "death") == 0
    assert await first.let_go(old) == 0
    assert await by_hand.strikes("a") == 1
    assert await second.answer(current) == 1


async def test_an_old_task_cannot_free_a_newer_claim_of_its_own_worker(by_hand: ByHand) -> None:
    await by_hand.enqueue("a")
    hand = by_hand.hand()
    old = await hand.take_one("a")
    await hand.give_back(old)
    new = await hand.take_one("a")
    assert new.token != old.token
    assert await hand.give_back(old) == 0
    assert (await by_hand.queue.depth("m")).running == 1
    assert await hand.answer(new) == 1


async def test_one_turn_that_cannot_be_stored_is_refused_alone(by_hand: ByHand) -> None:
    await by_hand.enqueue("a", "b")
    hand = by_hand.hand()
    a, b = await hand.take("a", "b")
    await by_hand.redis.set(by_hand.keys.failure(h("a")), "of another type")
    results = await by_hand.script(
        FINISH,
        *Finish(a.hash, a.token, "fail", "engine_error", b"{}", b"{}"),
        *Finish(b.hash, b.token, "ok", "", b"{}", b"{}"),
    )
    assert results in ([-1, 1], [0, 1])
    assert await by_hand.redis.exists(by_hand.keys.reply(h("b")))


# Suspects


@pytest.mark.parametrize("reason", ["drain", "handback", "retry"])
async def test_a_polite_end_is_no_strike(by_hand: ByHand, reason: str) -> None:
    await by_hand.enqueue("a")
    hand = by_hand.hand()
    for _ in range(4):
        await hand.give_back(await hand.take_one("a"), reason)
    assert await by_hand.strikes("a") == 0
    claim = await hand.take_one("a")
    assert claim.company is Company.ANY
    assert [one.outcome for one in claim.earlier] == [reason] * 4


async def crowd(by_hand: ByHand, count: int, deaths: int = 2) -> list[str]:
    """Turns that have died together so often, in workers that held them all. Their hashes."""
    names = [f"crowd{i}" for i in range(count)]
    await by_hand.enqueue(*names)
    for _ in range(deaths):
        dying = by_hand.hand()
        while len(dying.held) < count:
            assert (await dying.claim(count)).claims
            await by_hand.end_trial(dying)
            await by_hand.wait_long(61_000)
        await dying.die()
    return [h(name) for name in names]


async def test_the_company_of_suspects_is_a_quarter_of_that_in_which_they_died(
    by_hand: ByHand,
) -> None:
    hashes = await crowd(by_hand, 20)
    one, other = by_hand.hand(), by_hand.hand()
    taken = await one.claim(100)
    assert len(taken.claims) == 5
    assert taken.drain
    assert {claim.company for claim in taken.claims} == {Company.SUSPECTS}
    assert len((await other.claim(100)).claims) == 5
    assert set(one.held).isdisjoint(other.held)
    assert {*one.held, *other.held} <= set(hashes)


async def test_a_suspect_whose_body_was_lost_is_a_suspect_again_once_it_is_sent(
    by_hand: ByHand,
) -> None:
    await by_hand.enqueue("a")
    await by_hand.strike("a", times=2)
    await by_hand.redis.delete(by_hand.keys.body(h("a")))
    assert not (await by_hand.hand().claim()).claims
    assert await by_hand.poll("a") == ["unknown"]
    assert await by_hand.enqueue("a", fresh=False, body=b"again") == ["queued"]
    (claim,) = (await by_hand.hand().claim()).claims
    assert (claim.hash, claim.body) == (h("a"), b"again")


async def test_many_runs_that_are_cancelled_hold_up_no_renewal(by_hand: ByHand) -> None:
    """What a renewal looks at grows with the turns that it renews, not with the runs that go."""
    await by_hand.enqueue("held")
    hand = by_hand.hand()
    await hand.take_one("held")
    for number in range(50):
        await by_hand.enqueue(f"other {number}", run=f"run{number}")
        await by_hand.cancel(run=f"run{number}")

    async def removals() -> int:
        stats = await by_hand.redis.info("commandstats")
        return int(stats.get("cmdstat_srem", {"calls": 0})["calls"])

    before = await removals()
    assert await hand.renew() == ([], [], True)
    assert await removals() - before < 25


async def test_who_died_in_small_company_runs_alone(by_hand: ByHand) -> None:
    await crowd(by_hand, 8)
    pair = by_hand.hand()
    tried = (await pair.claim(100)).hashes
    assert len(tried) == 2
    await pair.die()
    await by_hand.wait_long(2_000, *tried)
    hand = by_hand.hand()
    taken = await hand.claim(100)
    assert [claim.company for claim in taken.claims] == [Company.ALONE]
    assert taken.hashes[0] in tried


async def test_suspects_on_trial_get_no_company_until_they_have_lived_through_it(
    by_hand: ByHand,
) -> None:
    await crowd(by_hand, 4)
    await by_hand.enqueue("other", "another")
    hand = by_hand.hand()
    (suspect,) = (await hand.claim(1)).claims
    assert suspect.company is Company.ALONE
    taken = await hand.claim(1)
    assert (taken.claims, taken.drain) == ([], True)
    await by_hand.end_trial(hand)
    assert (await hand.claim(1)).hashes == [h("other")]
    assert (await hand.claim(1)).hashes == [h("another")]
    await hand.die()
    assert [await by_hand.strikes(name) for name in ("other", "another")] == [1, 1]


async def test_a_trial_is_over_when_its_turns_have_ended(by_hand: ByHand) -> None:
    await crowd(by_hand, 8)
    await by_hand.enqueue("other")
    hand = by_hand.hand()
    for left in (6, 4, 2, 0):
        taken = await hand.claim(100, holding=0)
        assert len(taken.claims) == 2
        assert (await by_hand.queue.depth("m")).suspects == left
        for claim in taken.claims:
            assert await hand.answer(claim) == 1
    assert (await hand.claim(100)).hashes == [h("other")]


async def test_a_busy_worker_takes_only_suspects_that_have_waited(by_hand: ByHand) -> None:
    await crowd(by_hand, 20)
    await by_hand.enqueue("other", "another")
    busy = by_hand.hand()
    assert (await busy.claim(1, holding=1)).hashes == [h("other")]
    assert (await busy.claim(100)).hashes == [h("another")]
    await by_hand.wait_long(61_000)
    assert len((await busy.claim(100)).claims) == 5
    assert (await busy.claim(100)).claims == []


async def test_a_death_accuses_only_those_on_trial(by_hand: ByHand) -> None:
    await crowd(by_hand, 20)
    await by_hand.enqueue("other")
    busy = by_hand.hand()
    await busy.claim(1, holding=1)
    await by_hand.wait_long(61_000)
    tried = (await busy.claim(100)).hashes
    await busy.die()
    assert await by_hand.strikes("other") == 0
    assert [await by_hand.strikes_of(hash) for hash in tried] == [3] * 5


async def test_leases_of_one_death_that_lapse_one_by_one_accuse_as_many(by_hand: ByHand) -> None:
    await crowd(by_hand, 20, deaths=1)
    dying, other = by_hand.hand(), by_hand.hand()
    held = (await dying.claim(20)).hashes
    for hash in held:
        await by_hand.lapse(hash)
        await by_hand.hand().renew()
        await other.claim(20, holding=0)  # which takes their owners' place
    companies = [await by_hand.company_of(hash) for hash in held]
    assert companies == [5] * 20


async def test_a_trial_is_longer_with_each_strike(by_hand: ByHand) -> None:
    await by_hand.enqueue("a")
    await by_hand.strike("a", times=2)
    lengths = []
    for _ in range(3):
        hand = by_hand.hand()
        await hand.take_one("a")
        lengths.append(await by_hand.redis.pttl(f"{by_hand.prefix}trial:{hand.id}"))
        await by_hand.end_trial(hand)
        # It lives through its trial, and dies when it has company again.
        name = f"b{len(lengths)}"
        await by_hand.enqueue(name)
        claim = await hand.take_one(name)
        await hand.die()
        await hand.answer(claim)
    assert [round(length / 10_000) for length in lengths] == [3, 6, 12]


async def test_no_number_of_deaths_in_a_crowd_makes_a_turn_poison_or_lonely(
    by_hand: ByHand,
) -> None:
    hashes = await crowd(by_hand, 40, deaths=7)
    assert [await by_hand.strikes_of(hash) for hash in hashes] == [7] * 40
    assert await by_hand.counts() == (40, 0, 0, 0)
    assert len((await by_hand.hand().claim(100)).claims) == 10


@pytest.mark.parametrize("how", ["death", "lapse"])
async def test_who_crashes_its_worker_alone_is_poison_at_the_fifth_death(
    by_hand: ByHand, how: str
) -> None:
    await by_hand.enqueue("a")
    await by_hand.strike("a", times=4)
    assert await by_hand.counts() == (1, 0, 0, 0)
    hand = by_hand.hand()
    (claim,) = (await hand.claim()).claims
    if how == "death":
        await hand.give_back(claim, "death")
    else:
        await by_hand.lapse(claim.hash)
        await by_hand.hand().renew()
    failure = (await by_hand.store.endings("run", [h("a")]))[h("a")]
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.tries) == ("poison", 5)
    assert await by_hand.counts() == (1, 0, 1, 0)
    trace = await by_hand.store.trace(h("a"))
    assert trace is not None
    assert (trace.worker, trace.outcome) == (hand.id, "failed")
    assert [one.outcome for one in trace.earlier] == ["death"] * 4 + [how]


@pytest.mark.parametrize("slots", [3, 16, 100, 400])
async def test_the_guilty_is_convicted_after_a_handful_of_deaths(
    by_hand: ByHand, slots: int
) -> None:
    """Among innocents that end well wherever it is not with them."""
    guilty = h("guilty")
    await by_hand.enqueue("guilty", *(f"innocent{i}" for i in range(slots - 1)))
    deaths = 0
    while (await by_hand.counts())[2] == 0:
        hand = by_hand.hand()
        while guilty not in hand.held:
            for claim in list(hand.held.values()):
                await hand.answer(claim)
            assert (await hand.claim(slots)).claims
        await hand.die()
        deaths += 1
    assert 5 <= deaths <= 6
    assert (await by_hand.store.endings("run", [guilty]))[guilty].kind == "poison"  # type: ignore[union-attr]
    last = by_hand.hand()
    while (await last.claim(slots, holding=0)).claims:
        for claim in list(last.held.values()):
            await last.answer(claim)
    assert await by_hand.counts() == (slots, slots - 1, 1, 0)


async def test_a_drain_while_alone_proves_nothing(by_hand: ByHand) -> None:
    await by_hand.enqueue("a")
    await by_hand.strike("a", times=4)
    hand = by_hand.hand()
    (claim,) = (await hand.claim()).claims
    await hand.give_back(claim, "drain")
    (claim,) = (await by_hand.hand().claim()).claims
    assert claim.company is Company.ALONE
    assert await hand.answer(claim) == 1


async def test_a_suspect_that_waits_long_empties_one_worker(by_hand: ByHand) -> None:
    await by_hand.enqueue("a")
    await by_hand.strike("a", times=2)
    await by_hand.enqueue("b", "c", "d", "e")
    first, second = by_hand.hand(), by_hand.hand()
    (b,) = (await first.claim(1, holding=1)).claims
    await second.claim(1, holding=1)
    await by_hand.redis.zadd(
        by_hand.keys.suspects("m"), {h("a"): await by_hand.now() - 301_000}, xx=True
    )
    taken = await first.claim(5)
    assert (taken.claims, taken.drain) == ([], True)
    # The other one goes on.
    assert (await second.claim(1)).hashes == [h("d")]
    await first.answer(b)
    assert (await first.claim(5)).hashes == [h("a")]


async def test_emptying_for_suspects_wakes_nobody_again_and_again(by_hand: ByHand) -> None:
    await by_hand.enqueue("a")
    await by_hand.strike("a", times=2)
    await by_hand.enqueue("b")
    hand, wake = by_hand.hand(), by_hand.keys.wake("m")
    await hand.claim(1, holding=1)
    await by_hand.redis.zadd(
        by_hand.keys.suspects("m"), {h("a"): await by_hand.now() - 301_000}, xx=True
    )
    assert (await hand.claim(5)).drain
    await by_hand.redis.delete(wake)
    assert (await hand.claim(5)).drain
    assert not await by_hand.redis.exists(wake)


# Turns that are due later


async def test_a_retry_waits_for_its_time(by_hand: ByHand) -> None:
    await by_hand.enqueue("a")
    hand = by_hand.hand()
    await hand.give_back(await hand.take_one("a"), "retry", delay=60)
    assert not (await hand.claim()).claims
    assert await by_hand.enqueue("a") == ["queued"]
    assert not (await hand.claim()).claims
    await by_hand.make_due(h("a"))
    claim = await hand.take_one("a")
    assert [one.outcome for one in claim.earlier] == ["retry"]


# Leaving


async def test_a_cancelled_turn_is_not_claimed(by_hand: ByHand) -> None:
    await by_hand.enqueue("a", "b")
    assert await by_hand.cancel("a", "unknown") == 1
    assert await by_hand.cancel("a") == 0
    await by_hand.hand().take("b")
    assert await by_hand.counts() == (2, 0, 0, 1)
    assert not await by_hand.redis.exists(by_hand.keys.body(h("a")))
    failure = (await by_hand.store.endings("run", [h("a")]))[h("a")]
    assert isinstance(failure, Failure)
    assert failure.kind == "cancelled"


async def test_the_worker_of_a_cancelled_turn_is_told(by_hand: ByHand) -> None:
    await by_hand.enqueue("a")
    hand = by_hand.hand()
    claim = await hand.take_one("a")
    await by_hand.cancel("a")
    assert await hand.renew() == ([], [h("a")], False)
    assert await hand.let_go(claim) == 1
    assert not await by_hand.redis.exists(by_hand.keys.body(h("a")))
    assert (await by_hand.queue.depth("m")).running == 0


async def test_an_answer_to_a_cancelled_turn_is_kept(by_hand: ByHand) -> None:
    await by_hand.enqueue("a")
    hand = by_hand.hand()
    claim = await hand.take_one("a")
    await by_hand.cancel("a")
    assert await hand.answer(claim) == 1
    assert await by_hand.counts() == (1, 0, 0, 1)
    assert await by_hand.enqueue("a") == ["answered"]
    assert await by_hand.counts() == (1, 1, 0, 0)


async def test_who_comes_back_for_a_turn_gets_it_although_it_was_let_go(by_hand: ByHand) -> None:
    await by_hand.enqueue("a")
    hand = by_hand.hand()
    claim = await hand.take_one("a")
    await by_hand.cancel("a")
    await hand.renew()
    assert await by_hand.enqueue("a") == ["running"]
    assert await hand.let_go(claim) == 1
    await by_hand.hand().take_one("a")


async def test_a_whole_run_is_cancelled(by_hand: ByHand) -> None:
    names = [f"t{i}" for i in range(450)]
    await by_hand.enqueue(*names)
    await by_hand.enqueue("o", run="other")
    hand = by_hand.hand()
    done = (await hand.claim(1, holding=0)).claims[0]
    await hand.answer(done)
    held = (await hand.claim(3)).claims
    assert await by_hand.cancel() == 450
    # Before anything is cleared: nothing more of it is handed out.
    assert set((await by_hand.hand().claim(100)).hashes) <= {h("o"), done.hash}
    calls = 1
    while (await by_hand.hand().renew())[2]:
        calls += 1
    assert calls == 3
    answered_of_run = 1 if done.hash != h("o") else 0
    assert (await by_hand.counts())[3] == 450 - answered_of_run
    unwanted = set((await hand.renew())[1])
    assert unwanted == {claim.hash for claim in held} - {h("o")}


async def test_a_run_that_asks_again_while_it_is_being_cancelled_is_served(
    by_hand: ByHand,
) -> None:
    await by_hand.enqueue("a", "b")
    await by_hand.cancel()
    assert await by_hand.poll("a") == ["cancelled"]
    assert await by_hand.enqueue("a") == ["queued"]
    hand = by_hand.hand()
    await hand.renew()
    await hand.take_one("a")
    assert await by_hand.counts() == (2, 0, 0, 1)


async def test_one_run_leaves_and_the_other_still_gets_the_turn(by_hand: ByHand) -> None:
    await by_hand.enqueue("a", run="one")
    await by_hand.enqueue("a", run="two")
    await by_hand.cancel("a", run="one")
    hand = by_hand.hand()
    await hand.answer(await hand.take_one("a"))
    assert await by_hand.counts("one") == (1, 0, 0, 1)
    assert await by_hand.counts("two") == (1, 1, 0, 0)


async def test_a_running_turn_that_one_run_leaves_goes_on(by_hand: ByHand) -> None:
    await by_hand.enqueue("a", run="one")
    await by_hand.enqueue("a", run="two")
    hand = by_hand.hand()
    claim = await hand.take_one("a")
    await by_hand.cancel("a", run="one")
    assert await hand.renew() == ([], [], False)
    # Its hint in the other run is gone; handed back, it gets one again.
    await by_hand.hand().claim()
    await hand.give_back(claim)
    await hand.take_one("a")


async def test_a_deadline_ends_the_turn_for_its_run_alone(by_hand: ByHand) -> None:
    await by_hand.enqueue("a", run="hasty", deadline=0.001)
    await by_hand.enqueue("a", run="patient")
    hand = by_hand.hand()
    await by_hand.redis.zadd(f"{by_hand.prefix}deadlines", {h("a") + "hasty": 1})
    await hand.renew()
    failure = (await by_hand.store.endings("hasty", [h("a")]))[h("a")]
    assert isinstance(failure, Failure)
    assert failure.kind == "deadline"
    assert await by_hand.counts("hasty") == (1, 0, 1, 0)
    await hand.answer(await hand.take_one("a"))
    assert await by_hand.counts("patient") == (1, 1, 0, 0)


async def test_a_deadline_after_the_answer_is_nothing(by_hand: ByHand) -> None:
    await by_hand.enqueue("a", deadline=100)
    hand = by_hand.hand()
    await hand.answer(await hand.take_one("a"))
    await by_hand.redis.zadd(f"{by_hand.prefix}deadlines", {h("a") + "run": 1})
    await hand.renew()
    assert await by_hand.counts() == (1, 1, 0, 0)


async def test_a_fresh_ask_after_a_failure_has_its_whole_time(by_hand: ByHand) -> None:
    await by_hand.enqueue("a", deadline=100)
    hand = by_hand.hand()
    await hand.fail(await hand.take_one("a"))
    await by_hand.redis.zadd(f"{by_hand.prefix}deadlines", {h("a") + "run": 1})
    await by_hand.enqueue("a", deadline=100)
    await hand.renew()
    await hand.take_one("a")


# A claim whose answer was lost


async def test_a_lost_claim_goes_back_without_a_strike(by_hand: ByHand) -> None:
    await by_hand.enqueue("a", "b")
    hand = by_hand.hand()
    token = hand.next_token()
    await hand.claim(5, token=token)
    hand.held.clear()
    assert await hand.recover(token) == 2
    claims = await hand.take("b", "a")
    assert await by_hand.strikes("a") == 0
    assert [one.outcome for one in claims[0].earlier] == ["handback"]


async def test_a_claim_that_arrives_after_it_was_given_up_takes_nothing(by_hand: ByHand) -> None:
    await by_hand.enqueue("a")
    hand = by_hand.hand()
    token = hand.next_token()
    assert await hand.recover(token) == 0
    taken = await hand.claim(5, token=token)
    assert (taken.claims, taken.more) == ([], False)
    await hand.take_one("a")


# Memory


async def test_at_full_memory_no_turn_comes_in_and_all_go_out(
    own_valkey: Callable[..., ValkeyServer],
) -> None:
    farm = Farm(own_valkey().url)
    client: Redis = farm.connect()
    by_hand = ByHand(client, farm)
    hand = by_hand.hand()
    await by_hand.enqueue("a", "b", "c")
    a, b = await hand.take("a", "b")
    used = (await client.info("memory"))["used_memory"]
    await client.config_set("maxmemory", int(used / 0.9))
    with pytest.raises(ResponseError, match="TURNMILLFULL"):
        await by_hand.enqueue("d")
    await client.config_set("maxmemory", int(used / 2))
    with pytest.raises(OutOfMemoryError):
        await by_hand.enqueue("d")
    assert await hand.renew() == ([], [], False)
    assert await hand.answer(a) == 1
    assert await hand.give_back(b) == 1
    assert await by_hand.cancel("b") == 1
    assert await hand.answer(await hand.take_one("c")) == 1
    await client.config_set("maxmemory", 0)
    assert await by_hand.enqueue("d", "a") == ["queued", "answered"]
    await client.aclose(close_connection_pool=True)


async def test_what_is_queued_counts_with_the_replies_that_it_will_bring(
    own_valkey: Callable[..., ValkeyServer],
) -> None:
    farm = Farm(own_valkey().url)
    client: Redis = farm.connect()
    by_hand = ByHand(client, farm)
    hand = by_hand.hand()
    await by_hand.enqueue("a", *(f"t{i}" for i in range(100)))
    await hand.answer(await hand.take_one("a"), os.urandom(70_000).hex())
    used = (await client.info("memory"))["used_memory"]
    await client.config_set("maxmemory", int(used / 0.85) + 5_000_000)
    with pytest.raises(ResponseError, match="TURNMILLFULL"):
        await by_hand.enqueue("b")
    await client.config_set("maxmemory", int((used + 100 * 200_000) / 0.85))
    assert await by_hand.enqueue("b") == ["queued"]
    await client.aclose(close_connection_pool=True)


def test_the_hands_of_these_tests_make_tokens_as_workers_do() -> None:
    assert len(Hand(None, "12345678").next_token()) == 24  # type: ignore[arg-type]
