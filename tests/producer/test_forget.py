"""FORGET, and `turnmill forget`: answers go on purpose, and nothing else does."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable

import pytest
from redis.asyncio import Redis
from tests.acceptance.conftest import Cli
from tests.by_hand import ByHand, h
from tests.processes import SimWorker, until, until_async

from turnmill import Client, Message, Reply, Sampling, Turn
from turnmill.holdings import Holdings
from turnmill.settings import Farm
from turnmill.turn import Turn as AnyTurn

Workers = Callable[..., SimWorker]


async def keys_of(hand: ByHand, name: str) -> set[str]:
    """The kinds of record that there are of a turn."""
    prefix = hand.keys.prefix
    return {kind for kind in "brxfytwcp" if await hand.redis.exists(f"{prefix}{kind}:{h(name)}")}


async def forget(hand: ByHand, *names: str, run: str = "", sha: str = "") -> list[int]:
    return await hand.queue.forget(hand.model, [(h(name), sha) for name in names], run)


@pytest.fixture
def holdings(by_hand: ByHand) -> Holdings:
    return Holdings(by_hand.redis, by_hand.keys, patience=5.0)


# The script


async def test_a_forgotten_answer_is_made_anew_and_counted_again(by_hand: ByHand) -> None:
    worker = by_hand.hand()
    for run in ("one", "two"):
        await by_hand.enqueue("a", run=run)
    await worker.answer(await worker.take_one("a"))
    assert await forget(by_hand, "a") == [1]
    assert await keys_of(by_hand, "a") == set()
    for run in ("one", "two"):
        assert await by_hand.counts(run) == (0, 0, 0, 0)
    assert await by_hand.poll("a") == ["unknown"]
    assert await by_hand.enqueue("a", run="one") == ["queued"]
    await worker.answer(await worker.take_one("a"), "another")
    assert await by_hand.counts("one") == (1, 1, 0, 0)
    reply = await by_hand.store.reply(h("a"))
    assert reply is not None
    assert reply.message.content == "another"


async def test_a_failure_is_forgotten_too(by_hand: ByHand) -> None:
    worker = by_hand.hand()
    await by_hand.enqueue("a")
    await worker.fail(await worker.take_one("a"), "invalid_request")
    assert await by_hand.counts() == (1, 0, 1, 0)
    assert await forget(by_hand, "a") == [1]
    assert await keys_of(by_hand, "a") == set()
    assert await by_hand.counts() == (0, 0, 0, 0)
    assert await by_hand.enqueue("a") == ["queued"]


async def test_a_call_that_is_repeated_drops_nothing_newer(by_hand: ByHand) -> None:
    worker = by_hand.hand()
    await by_hand.enqueue("a")
    await worker.answer(await worker.take_one("a"), "old")
    old = hashlib.sha1(await by_hand.redis.get(by_hand.keys.reply(h("a")))).hexdigest()
    assert await forget(by_hand, "a", sha=old) == [1]
    await by_hand.enqueue("a")
    assert await forget(by_hand, "a", sha=old) == [0]  # open
    await worker.answer(await worker.take_one("a"), "new")
    assert await forget(by_hand, "a", sha=old) == [0]
    assert await by_hand.poll("a") == ["answered"]


async def test_open_turns_are_left_alone(by_hand: ByHand) -> None:
    worker = by_hand.hand()
    await by_hand.enqueue("leased")
    claim = await worker.take_one("leased")
    await by_hand.enqueue("queued")
    assert await forget(by_hand, "leased", "queued", "never heard of") == [0, 0, 0]
    assert await forget(by_hand, "leased", "queued", run="run") == [0, 0]
    assert await worker.answer(claim) == 1
    assert (await worker.claim()).hashes == [h("queued")]
    assert await by_hand.counts() == (2, 1, 0, 0)


async def test_what_another_run_holds_stays(by_hand: ByHand) -> None:
    worker = by_hand.hand()
    await by_hand.enqueue("shared", "own", run="one")
    await by_hand.enqueue("shared", run="two")
    for claim in (await worker.claim()).claims:
        await worker.answer(claim)
    assert await forget(by_hand, "shared", "own", run="one") == [2, 1]
    assert await by_hand.poll("shared", run="two") == ["answered"]
    assert await by_hand.redis.hkeys(by_hand.keys.waiters(h("shared"))) == [b"two"]
    assert await keys_of(by_hand, "own") == set()
    assert await by_hand.counts("one") == (0, 0, 0, 0)
    assert await by_hand.counts("two") == (1, 1, 0, 0)
    # Not its turn any more: a call that is repeated does nothing.
    assert await forget(by_hand, "shared", "own", run="one") == [0, 0]


async def test_a_run_that_left_a_turn_lets_go_of_that_too(by_hand: ByHand) -> None:
    worker = by_hand.hand()
    await by_hand.enqueue("a", run="stays")
    await by_hand.enqueue("a", run="left")
    await by_hand.cancel("a", run="left")
    assert await by_hand.counts("left") == (1, 0, 0, 1)
    assert await forget(by_hand, "a", run="left") == [2]
    assert await by_hand.counts("left") == (0, 0, 0, 0)
    assert await keys_of(by_hand, "a") == {"b", "w"}
    await worker.take_one("a")


async def test_nothing_of_a_run_stays(by_hand: ByHand, holdings: Holdings) -> None:
    """Also none of its turns that were answered, failed, cancelled, given up in time; nor a stale hint."""
    worker = by_hand.hand()
    names = ["answered", "failed", "left", "late"]
    await by_hand.enqueue(*names[:3])
    await by_hand.enqueue("late", deadline=0.001)
    await by_hand.redis.set(by_hand.keys.manifest("run"), "{}")
    await by_hand.redis.hset(by_hand.keys.journal("run"), "effect", "17")
    claims = {claim.hash: claim for claim in (await worker.claim()).claims}
    await by_hand.enqueue("hint", run="other")
    await worker.answer(claims[h("answered")])
    await worker.fail(claims[h("failed")])
    await by_hand.cancel("left")
    await worker.let_go(claims[h("left")])

    async def late() -> bool:
        await worker.renew()
        return (await by_hand.counts())[2] == 2

    await until_async(late, "its time is up")
    await worker.let_go(claims[h("late")])
    assert await by_hand.counts() == (4, 1, 2, 1)
    await by_hand.enqueue("hint")
    await worker.answer(await worker.take_one("hint"))  # leaves a hint in `run`

    forgotten = await holdings.forget_run("run")
    assert (forgotten.turns, forgotten.dropped, forgotten.left) == (5, 2, 0)
    for name in names:
        assert await keys_of(by_hand, name) == set(), name
    found = [key async for key in by_hand.redis.scan_iter(f"{by_hand.farm.namespace}:*run*")]
    assert [key.decode().removeprefix(by_hand.keys.prefix) for key in found] in (
        ["runs", "run:other"],
        ["run:other", "runs"],
    )
    assert [info.name for info in await by_hand.store.runs()] == ["other"]
    assert await by_hand.poll("hint", run="other") == ["answered"]
    assert not (await holdings.forget_run("run")).existed


async def test_cancelled_turns_that_nobody_cleared_go_on_for_others(
    by_hand: ByHand, holdings: Holdings
) -> None:
    worker = by_hand.hand()
    await by_hand.enqueue("running")
    claim = await worker.take_one("running")
    await by_hand.enqueue("mine", "shared")
    await by_hand.enqueue("shared", run="other")
    await by_hand.cancel()
    assert await holdings.open_turns("run") == 0
    forgotten = await holdings.forget_run("run")
    assert (forgotten.turns, forgotten.dropped, forgotten.left) == (3, 0, 0)
    assert await keys_of(by_hand, "mine") == set()
    _, unwanted, _ = await worker.renew()
    assert unwanted == [h("running")]
    await worker.let_go(claim)
    assert await keys_of(by_hand, "running") == set()
    await worker.take_one("shared")


async def test_a_batch_is_not_too_long(by_hand: ByHand, holdings: Holdings) -> None:
    """A run of more turns than one call takes; and a kill between two calls loses its place, no more."""
    worker = by_hand.hand()
    names = [f"t{i}" for i in range(450)]
    await by_hand.enqueue(*names)
    for claim in (await worker.claim(450)).claims:
        await worker.answer(claim)
    calls = 0
    real = holdings.queue.forget

    async def until_the_second(*arguments: object) -> list[int]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise asyncio.CancelledError
        return await real(*arguments)  # type: ignore[arg-type]

    holdings.queue.forget = until_the_second  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        await holdings.forget_run("run")
    total, done, _, _ = await by_hand.counts()
    assert total == done
    assert 0 < total < 450
    holdings.queue.forget = real  # type: ignore[method-assign]
    forgotten = await holdings.forget_run("run")
    assert (forgotten.dropped, forgotten.left) == (total, 0)
    assert [
        key async for key in by_hand.redis.scan_iter(f"{by_hand.farm.namespace}:[brxw]:*")
    ] == []


async def test_the_model_is_found_without_the_body(client: Redis, farm: Farm) -> None:
    one, two = ByHand(client, farm, "m1"), ByHand(client, farm, "m2")
    await one.enqueue("x")
    await two.enqueue("a", body=b"not a turn")
    worker = two.hand()
    await worker.fail(await worker.take_one("a"), "unreadable")
    (answer,) = await Holdings(client, farm.keys, 5.0).forget_answers([h("a")])
    assert (answer.state, answer.runs) == ("dropped", ["run"])
    assert await client.scard(farm.keys.turns("m2", "run")) == 0
    assert await two.counts() == (1, 0, 0, 0)  # the other model's


# The client and the command


async def test_the_client_forgets(farm: Farm, worker: Workers) -> None:
    worker("--served-name", "m")
    turn = Turn(model="m", messages=[Message(role="user", content="Hi")])
    async with Client(farm.url, namespace=farm.namespace) as client:
        assert await client.forget([turn.hash]) == 0
        await client.ask(turn)
        assert await client.forget([turn.hash, turn.hash]) == 1
        assert await client.result(turn.hash) is None
        state, ending = await client.ask_stating(turn)
        assert state == "queued"
        assert isinstance(ending, Reply)


def counters(cli: Cli) -> dict[str, dict[str, int]]:
    return {run["name"]: run for run in json.loads(cli("status", "--json").stdout)["runs"]}


@pytest.mark.faults
def test_the_command(on_farm: Cli, worker: Workers, farm: Farm) -> None:
    first = worker("--served-name", "m")
    source = str(on_farm.conversations(10))  # greedy, so runs share them
    line = ("run", source, "--model", "m", "--json", "--run")
    for run in ("one", "two"):
        on_farm(*line, run)
    assert "say --yes" in on_farm("forget", "one", exits=2).stderr
    assert "run name" not in (said := on_farm("forget", "one", "--yes").stdout)
    assert said == (
        "run one: 0 answers dropped; 30 turns had none, or are held by other runs too\n"
    )
    assert counters(on_farm).keys() == {"two"}

    hash = AnyTurn(
        model="m",
        messages=[Message(role="user", content="conversation 3, turn 0")],
        sampling=Sampling(temperature=0),
    ).hash
    assert f"{hash}: dropped; it was held by two, " in on_farm("forget", hash, "--yes").stdout
    assert "no answer of it is stored" in on_farm("forget", hash, "--yes").stdout
    report = json.loads(on_farm(*line, "two").stdout)
    assert (report["asked"], report["from_store"]) == (1, 29)

    # Refused while it is driven, and while it waits; nothing is dropped then.
    first.kill()
    driven = on_farm.start("run", str(on_farm.conversations(10, 4)), "--extend", *line[2:], "two")
    until(lambda: counters(on_farm)["two"]["total"] > 30, "more is asked")
    assert "has a producer: process" in on_farm("forget", "two", "--yes", exits=2).stderr
    driven.kill()
    driven.wait()
    refused = on_farm("forget", "one", "two", "--yes", exits=2).stderr
    assert refused == (
        "turnmill: run 'two' has open turns (10): let it end, or cancel it, and then again\n"
    )
    assert counters(on_farm)["two"]["done"] == 30
    on_farm("cancel", "two")
    said = json.loads(on_farm("forget", "two", "one", "--yes", "--json").stdout)
    assert [run["existed"] for run in said["runs"]] == [True, False]
    assert (said["runs"][0]["turns"], said["runs"][0]["dropped"]) == (40, 30)
    assert not counters(on_farm)
