"""The names in keys.py and those that the scripts compute are the same, and all begin with the namespace."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis
from tests.by_hand import ByHand, h

from turnmill.keys import Keys
from turnmill.settings import Farm


async def all_keys(redis: Redis, pattern: str) -> set[str]:
    return {raw.decode() async for raw in redis.scan_iter(pattern, count=1000)}


@pytest.fixture
async def used(by_hand: ByHand) -> set[str]:
    """Every key of a farm in which much has happened."""
    hand = by_hand.hand()
    await by_hand.enqueue("suspect")
    await by_hand.strike("suspect", times=2)
    await by_hand.enqueue("going", going=True)
    await by_hand.enqueue("due", "failed", "answered", "left", deadline=100)
    taken = await hand.claim(4, holding=1)
    claims = {claim.hash: claim for claim in taken.claims}
    await hand.give_back(claims[h("due")], "retry", delay=60)
    await hand.fail(claims[h("failed")])
    await hand.answer(claims[h("answered")])
    await by_hand.cancel("left")
    await by_hand.enqueue("new")
    return await all_keys(by_hand.redis, f"{by_hand.farm.namespace}*")


async def test_the_scripts_use_the_names_of_keys_py(used: set[str], by_hand: ByHand) -> None:
    keys, model = by_hand.keys, by_hand.model
    named = {
        keys.body(h("going")),
        keys.reply(h("answered")),
        keys.trace(h("answered")),
        keys.failure(h("failed")),
        keys.leavers(h("left")),
        keys.finished(model),
        keys.wake(model),
        keys.leases(model),
        keys.owners(model),
        keys.due(model),
        keys.suspects(model),
        keys.classes(model),
        keys.ready(model, "5"),
        keys.new(model, "5", "run"),
        keys.turns(model, "run"),
        keys.models,
        keys.runs,
        keys.run("run"),
    }
    assert named <= used


async def test_every_key_begins_with_the_namespace(used: set[str], by_hand: ByHand) -> None:
    assert all(key.startswith(f"{by_hand.farm.namespace}:") for key in used)
    queue = by_hand.keys.queue(by_hand.model)
    of_turns = {f"{by_hand.keys.prefix}{kind}:" for kind in "brxftwcy"}
    for key in used - {by_hand.keys.models, by_hand.keys.runs, by_hand.keys.run("run")}:
        assert key.startswith(queue) or key[: len(by_hand.keys.prefix) + 2] in of_turns, key


async def test_two_namespaces_know_nothing_of_each_other(client: Redis, farm: Farm) -> None:
    one, two = ByHand(client, farm), ByHand(client, Farm(farm.url, f"{farm.namespace}x"))
    await one.enqueue("a")
    assert await two.poll("a") == ["unknown"]
    assert not (await two.hand().claim()).claims
    assert not await two.store.runs()


async def test_two_models_have_queues_of_their_own(client: Redis, farm: Farm) -> None:
    # One name is the beginning of the other, and both have a colon: names are taken as they come.
    one, two = ByHand(client, farm, "org/model:a"), ByHand(client, farm, "org/model:a:b")
    await one.enqueue("a")
    await two.enqueue("b")
    await one.hand().take("a")
    await two.hand().take("b")
    assert await one.store.models() == ["org/model:a", "org/model:a:b"]


def test_no_two_names_are_the_same() -> None:
    keys = Keys("n")
    names = [
        *(getattr(keys, kind)("x") for kind in ("body", "reply", "trace", "failure", "leavers")),
        *(getattr(keys, kind)("x") for kind in ("partial", "told_of", "tries", "waiters")),
        keys.told("m"),
        *(
            getattr(keys, kind)("x")
            for kind in ("worker", "run", "manifest", "engines", "producer")
        ),
        *(getattr(keys, kind)("m") for kind in ("finished", "wake", "leases", "owners", "due")),
        *(getattr(keys, kind)("m") for kind in ("suspects", "classes")),
        keys.ready("m", "5"),
        keys.going("m", "5", "r"),
        keys.new("m", "5", "r"),
        keys.turns("m", "r"),
        keys.lease,
        keys.models,
        keys.workers,
        keys.crashes("x"),
        keys.benched,
        keys.runs,
    ]
    assert len(set(names)) == len(names)
