"""Any order of operations, by several runs and workers, keeps the queue's invariants.

Seeded random walks call the scripts as producers and workers would, in orders that nobody would write down,
and look at everything after each step. At the end everything that is wanted gets answered.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.by_hand import ByHand, Hand, h

from turnmill_worker.claim import Claim
from turnmill_worker.scripts import KEEP

TURNS = [f"turn{number}" for number in range(30)]
HASHES = {h(name): name for name in TURNS}
RUNS = ["a", "b", "c"]
CLASS_OF = {"a": 5, "b": 5, "c": 7}
STEPS = 300
WINDOW = 8
"""Turns that producers deal with at a time; it moves on, since what is answered has nothing more to say."""


@dataclass
class Seen:
    """What the server holds of one turn."""

    reply: str | None
    failure: bool
    waiters: set[str]
    leavers: dict[str, str]
    leased: bool
    due: bool
    suspect: bool
    owner: str | None
    body: bool
    strikes: int
    stream: bool
    told: str | None
    hints: list[tuple[str, str]] = field(default_factory=list)
    """Class and run of each list that has the turn."""

    @property
    def ended(self) -> bool:
        return self.reply is not None or self.failure


@dataclass
class Farm:
    turns: dict[str, Seen]
    ready: dict[str, set[str]]
    member: dict[str, set[str]]
    """Per run: the turns that it ever asked for."""
    swept: dict[str, set[str]]
    counters: dict[str, dict[str, str]]


LOOK = """
local N, Q = KEYS[1], KEYS[2]
local C = redis.call
local function pairs_of(flat)
  local out = {}
  for i = 1, #flat, 2 do out[flat[i]] = flat[i + 1] end
  return out
end
local turns, runs, ready = {}, {}, {}
for _, h in ipairs(cjson.decode(ARGV[1])) do
  turns[h] = {
    reply = C('GET', N .. 'r:' .. h),
    failure = C('EXISTS', N .. 'f:' .. h) == 1,
    waiters = C('HKEYS', N .. 'w:' .. h),
    leavers = pairs_of(C('HGETALL', N .. 'c:' .. h)),
    leased = C('ZSCORE', Q .. 'leases', h) and true,
    due = C('ZSCORE', Q .. 'due', h) and true,
    suspect = C('ZSCORE', Q .. 'suspects', h) and true,
    owner = C('HGET', Q .. 'owners', h),
    body = C('EXISTS', N .. 'b:' .. h) == 1,
    strikes = tonumber(C('HGET', N .. 't:' .. h, 'strikes') or 0),
    stream = C('HEXISTS', N .. 't:' .. h, 'stream') == 1,
    told = C('GET', N .. 's:' .. h),
  }
end
for _, run in ipairs(cjson.decode(ARGV[2])) do
  local hints = {}
  for _, class in ipairs(cjson.decode(ARGV[3])) do
    ready[class] = C('ZRANGE', Q .. 'ready:' .. class, 0, -1)
    for _, list in ipairs({ 'going:', 'new:' }) do
      for _, h in ipairs(C('LRANGE', Q .. list .. class .. ':' .. run, 0, -1)) do
        hints[#hints + 1] = { class, h }
      end
    end
  end
  runs[run] = {
    turns = C('SMEMBERS', Q .. 'turns:' .. run),
    swept = C('SMEMBERS', Q .. 'sweep:' .. run),
    counters = pairs_of(C('HGETALL', N .. 'run:' .. run)),
    hints = hints,
  }
end
return cjson.encode({ turns = turns, runs = runs, ready = ready })
"""


async def look(farm: ByHand) -> Farm:
    """All that the server holds, at one moment."""
    classes = sorted({str(number) for number in CLASS_OF.values()})
    args = [json.dumps(list(HASHES)), json.dumps(RUNS), json.dumps(classes)]
    text = await farm.redis.eval(LOOK, 2, farm.keys.prefix, farm.prefix, *args)
    found = json.loads(text)
    turns = {
        hash: Seen(
            reply=seen["reply"] or None,
            failure=seen["failure"],
            waiters=set(seen["waiters"]),
            leavers=dict(seen["leavers"]),
            leased=bool(seen["leased"]),
            due=bool(seen["due"]),
            suspect=bool(seen["suspect"]),
            owner=seen["owner"] or None,
            body=seen["body"],
            strikes=seen["strikes"],
            stream=seen["stream"],
            told=seen["told"] or None,
        )
        for hash, seen in found["turns"].items()
    }
    for run, seen in found["runs"].items():
        for number, hash in seen["hints"]:
            turns[hash].hints.append((number, run))
    return Farm(
        turns,
        ready={number: set(runs) for number, runs in found["ready"].items()},
        member={run: set(seen["turns"]) for run, seen in found["runs"].items()},
        swept={run: set(seen["swept"]) for run, seen in found["runs"].items()},
        counters={run: dict(seen["counters"]) for run, seen in found["runs"].items()},
    )


def check(farm: Farm) -> None:
    """What is true at every moment."""
    for hash, turn in farm.turns.items():
        name = HASHES[hash]
        assert not (turn.reply is not None and turn.failure), f"{name}: a reply and a failure"
        assert not (turn.ended and turn.leased), f"{name}: ended, and leased"
        assert not (turn.ended and turn.owner), f"{name}: ended, and owned"
        assert not turn.leased or turn.owner, f"{name}: leased by nobody"
        assert not turn.told or turn.stream, f"{name}: told, and nobody reads along"
        assert not (turn.ended and turn.stream), f"{name}: ended, and streamed"
        assert not turn.waiters & turn.leavers.keys(), f"{name}: waits for it and has left it"
        if turn.waiters and not turn.ended:
            check_can_be_claimed(farm, hash)
        if not turn.waiters and not turn.leased and not turn.ended:
            assert not turn.body, f"{name}: nobody wants it or works on it, and its body stays"
    for run in RUNS:
        check_counters(farm, run)


def check_can_be_claimed(farm: Farm, hash: str) -> None:
    """An open turn that is neither leased, due nor a suspect has a live hint."""
    turn, name = farm.turns[hash], HASHES[hash]
    assert turn.body, f"{name}: wanted, and has no body"
    if turn.leased or turn.due or turn.suspect:
        return
    live = [
        run
        for number, run in turn.hints
        if run in turn.waiters and run in farm.ready[number] and hash not in farm.swept[run]
    ]
    being_swept = any(hash in swept for swept in farm.swept.values())
    assert live or being_swept, f"{name}: open, and no hint leads to it ({turn})"
    assert turn.strikes < 2 or being_swept, f"{name}: a suspect among the others ({turn})"


def check_counters(farm: Farm, run: str) -> None:
    asked = farm.member[run] | farm.swept[run]
    counters = farm.counters[run]
    waits = [turn for turn in farm.turns.values() if run in turn.waiters]
    left = Counter(turn.leavers.get(run) for turn in farm.turns.values())
    found = {
        "total": len(asked),
        "done": sum(turn.reply is not None for turn in waits),
        "failed": sum(turn.failure for turn in waits) + left["deadline"],
        "cancelled": left["cancelled"],
    }
    counted = {name: int(counters.get(name, 0)) for name in found}
    assert counted == found, f"run {run}"
    still_open = sum(not turn.ended for turn in waits)
    assert found["total"] == still_open + found["done"] + found["failed"] + found["cancelled"], run


class Walk:
    """One random walk."""

    def __init__(self, farm: ByHand, seed: int) -> None:
        self.farm, self.random = farm, random.Random(seed)
        self.hands = [farm.hand() for _ in range(3)]
        self.stale: list[tuple[Hand, Claim]] = []
        self.lost_tokens: list[tuple[Hand, str]] = []
        self.first_replies: dict[str, str] = {}
        self.answers: Counter[str] = Counter()
        self.log: list[str] = []

    async def step(self) -> None:
        steps: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self.enqueue, 8),
            (self.poll, 2),
            (self.claim, 8),
            (self.claim_and_lose_the_answer, 1),
            (self.recover, 2),
            (self.tell, 10),
            (self.answer, 5),
            (self.answer_late, 2),
            (self.fail, 2),
            (self.give_back, 4),
            (self.renew, 5),
            (self.lapse, 4),
            (self.outage, 1),
            (self.die, 1),
            (self.make_due, 2),
            (self.live_through_trial, 1),
            (self.cancel, 2),
            (self.cancel_run, 1),
            (self.pass_deadlines, 1),
            (self.lose, 1),
        ]
        do = self.random.choices([s for s, _ in steps], [weight for _, weight in steps])[0]
        await do()

    def say(self, *what: Any) -> None:
        self.log.append(" ".join(HASHES.get(str(part), str(part)) for part in what))

    def some(self, most: int = 3) -> list[str]:
        start = len(self.log) * (len(TURNS) - WINDOW) // (2 * STEPS)
        window = TURNS[start : start + WINDOW]
        return self.random.sample(window, self.random.randint(1, most))

    def a_claim(self) -> tuple[Hand, Claim] | None:
        held = [(hand, claim) for hand in self.hands for claim in hand.held.values()]
        return self.random.choice(held) if held else None

    # Producers

    async def enqueue(self) -> None:
        run, chosen = self.random.choice(RUNS), self.some(4)
        options: dict[str, Any] = {
            "going": self.random.random() < 0.3,
            "retry_failed": self.random.random() < 0.5,
            "deadline": self.random.choice([None, None, 100.0]),
            "stream": self.random.random() < 0.5,
        }
        self.say("enqueue", run, *chosen, options)
        states = await self.farm.enqueue(*chosen, run=run, priority=CLASS_OF[run], **options)
        assert not {"cancelled", "deadline", "unknown"} & set(states)

    async def poll(self) -> None:
        run, chosen = self.random.choice(RUNS), self.some()
        self.say("poll", run, *chosen)
        states = await self.farm.enqueue(
            *chosen, run=run, priority=CLASS_OF[run], fresh=False, body=b""
        )
        self.say(" ", *states)

    async def cancel(self) -> None:
        run, chosen = self.random.choice(RUNS), self.some()
        self.say("cancel", run, *chosen)
        await self.farm.cancel(*chosen, run=run)

    async def cancel_run(self) -> None:
        run = self.random.choice(RUNS)
        self.say("cancel all of", run)
        await self.farm.cancel(run=run)

    async def lose(self) -> None:
        """A failover takes a turn that was just enqueued; its poll brings it back, body and all."""
        state = await look(self.farm)
        lost = [
            hash
            for hash, turn in state.turns.items()
            if turn.waiters
            and not (turn.ended or turn.owner or turn.due or turn.suspect)
            and not any(hash in swept for swept in state.swept.values())
        ]
        if not lost:
            return
        hash = self.random.choice(lost)
        runs = sorted(state.turns[hash].waiters)
        self.say("lose", hash, runs)
        keys, model = self.farm.keys, self.farm.model
        await self.farm.redis.delete(keys.body(hash), f"{keys.prefix}w:{hash}")
        for number, run in state.turns[hash].hints:
            await self.farm.redis.lrem(keys.new(model, number, run), 0, hash)
            await self.farm.redis.lrem(keys.going(model, number, run), 0, hash)
        for run in runs:
            number = CLASS_OF[run]
            options: dict[str, Any] = {"run": run, "priority": number, "fresh": False}
            (answer,) = await self.farm.enqueue(HASHES[hash], **options)
            if answer == "unknown":
                body = HASHES[hash].encode()
                await self.farm.enqueue(HASHES[hash], **options, body=body)

    # Workers

    async def claim(self) -> None:
        hand = self.random.choice(self.hands)
        taken = await hand.claim(self.random.randint(1, 4))
        self.say("claim", hand.id, *taken.hashes, *(claim.company for claim in taken.claims))
        if any(claim.company == "!" for claim in taken.claims):
            assert len(hand.held) == 1

    async def claim_and_lose_the_answer(self) -> None:
        hand = self.random.choice(self.hands)
        before, token = dict(hand.held), hand.next_token()
        taken = await hand.claim(2, token=token)
        self.say("claim without an answer", hand.id, *taken.hashes)
        hand.held = before
        self.lost_tokens.append((hand, token))

    async def recover(self) -> None:
        if self.lost_tokens:
            hand, token = self.lost_tokens.pop()
            self.say("recover", hand.id, await hand.recover(token))
            assert not (await hand.claim(2, token=token, holding=0)).claims

    async def tell(self) -> None:
        """By the owner, or by one who has lost the turn: of what was told it goes on, or begins again."""
        found = self.random.choice([self.a_claim(), *self.stale[-2:]])
        if not found or not found[1].stream:
            return
        hand, claim = found
        told = (await look(self.farm)).turns[claim.hash].told or claim.token
        if self.random.random() < 0.2:
            told = claim.token
        at, text = len(told) - 24, f"{len(self.log)} "
        kept = (0, len(text), text)
        answer = await self.farm.script(
            KEEP, "engine", claim.hash, claim.token, *kept, told[:24], at, text
        )
        self.say("tell", hand.id, claim.hash, answer)
        seen = (await look(self.farm)).turns[claim.hash]
        assert (answer[0] >= 0) is (seen.owner or "").startswith(claim.token)
        if answer[0] >= 0:
            assert seen.told == told + text or told == claim.token

    async def answer(self) -> None:
        if found := self.a_claim():
            await self._answer(*found)

    async def answer_late(self) -> None:
        """By one who has lost the turn, or was told that nobody wants it."""
        if self.stale:
            await self._answer(*self.stale.pop(self.random.randrange(len(self.stale))))

    async def _answer(self, hand: Hand, claim: Claim) -> None:
        before = (await look(self.farm)).turns[claim.hash]
        done = await hand.answer(claim, f"{hand.id} {len(self.log)}")
        if done and before.told:
            assert (before.owner or "").startswith(claim.token), "answered by another than told"
        self.say("answer", hand.id, claim.hash, done)
        self.answers[claim.hash] += done

    async def fail(self) -> None:
        if found := self.a_claim():
            hand, claim = found
            kind = self.random.choice(["engine_error", "invalid_request"])
            self.say("fail", hand.id, claim.hash, kind, await hand.fail(claim, kind))

    async def give_back(self) -> None:
        if found := self.a_claim():
            hand, claim = found
            reason = self.random.choice(["drain", "handback", "retry", "death"])
            delay = self.random.choice([0, 100])
            self.say("give back", hand.id, claim.hash, reason, delay)
            await hand.give_back(claim, reason, delay)

    async def renew(self) -> None:
        hand = self.random.choice(self.hands)
        lost, unwanted, _ = await hand.renew()
        self.say("renew", hand.id, "lost", *lost, "unwanted", *unwanted)
        for hash in lost:
            self.stale.append((hand, hand.held.pop(hash)))
        for hash in unwanted:
            await hand.let_go(hand.held[hash])

    async def lapse(self) -> None:
        if found := self.a_claim():
            self.say("lapse", found[1].hash)
            await self.farm.lapse(found[1].hash)
            await self.random.choice(self.hands).claim(0)

    async def outage(self) -> None:
        self.say("outage")
        leases = self.farm.keys.leases(self.farm.model)
        held = await self.farm.redis.zrange(leases, 0, -1)
        await self.farm.lapse(*[raw.decode() for raw in held]) if held else None
        await self.farm.seen(60_000)

    async def die(self) -> None:
        """SIGKILL: its turns are forgotten here, and a new worker comes."""
        hand = self.random.choice(self.hands)
        self.say("die", hand.id, *hand.held)
        self.stale += [(hand, claim) for claim in hand.held.values()]
        if hand.held:
            await self.farm.lapse(*hand.held)
        self.hands[self.hands.index(hand)] = self.farm.hand()

    async def live_through_trial(self) -> None:
        hand = self.random.choice(self.hands)
        self.say("end of trial", hand.id)
        await self.farm.end_trial(hand)
        await self.farm.wait_long(61_000)

    async def make_due(self) -> None:
        await self.farm.make_due(*HASHES)

    async def pass_deadlines(self) -> None:
        key = f"{self.farm.prefix}deadlines"
        entries = await self.farm.redis.zrange(key, 0, -1)
        if entries:
            entry = self.random.choice(entries)
            self.say("deadline", entry[:64].decode(), entry[64:].decode())
            await self.farm.redis.zadd(key, {entry: 1})

    # After each step, and at the end

    async def look_around(self) -> Farm:
        state = await look(self.farm)
        check(state)
        for hash, turn in state.turns.items():
            if turn.reply is not None:
                first = self.first_replies.setdefault(hash, turn.reply)
                assert turn.reply == first, f"{HASHES[hash]}: its reply was replaced"
        return state

    async def to_the_end(self) -> None:
        """Only what a farm at rest does: tokens recovered, leases renewed or lapsed, turns answered."""
        while self.lost_tokens:
            await self.recover()
        for hand in self.hands:
            lost, unwanted, _ = await hand.renew()
            for hash in lost:
                del hand.held[hash]
            for hash in unwanted:
                await hand.let_go(hand.held[hash])
            for claim in list(hand.held.values()):
                await hand.give_back(claim, "drain")
        last = self.farm.hand()
        for _ in range(100):
            await last.renew()
            await self.farm.make_due(*HASHES)
            held = await self.farm.redis.zrange(self.farm.keys.leases(self.farm.model), 0, -1)
            if held:
                await self.farm.lapse(*[raw.decode() for raw in held])
            taken = await last.claim(4)
            for claim in taken.claims:
                await self._answer(last, claim)
            state = await self.look_around()
            swept = any(state.swept.values())
            if (
                not taken.claims
                and not taken.more
                and not swept
                and not await last_things(self.farm)
            ):
                return
        raise AssertionError("the queue does not come to rest")


async def last_things(farm: ByHand) -> int:
    """How many turns are leased, due or suspects."""
    depth = await farm.queue.depth(farm.model)
    return depth.running + depth.due + depth.suspects


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_happens_everything_wanted_is_answered_once(
    by_hand: ByHand, seed: int
) -> None:
    walk = Walk(by_hand, seed)
    try:
        for _ in range(STEPS):
            await walk.step()
            await walk.look_around()
        await walk.to_the_end()
        state = await walk.look_around()
    except AssertionError:
        print("\n".join(walk.log))
        raise
    for hash, turn in state.turns.items():
        if turn.waiters:
            assert turn.ended, HASHES[hash]
        assert turn.owner is None
        assert walk.answers[hash] == (turn.reply is not None)
    stored = await by_hand.redis.hget(f"{by_hand.prefix}stored", "replies")
    assert int(stored or 0) == sum(turn.reply is not None for turn in state.turns.values())
