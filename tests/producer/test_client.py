"""The client, against a real server; turns are answered by a worker process or by hand."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from redis.asyncio import Redis
from tests.by_hand import ByHand, Hand
from tests.processes import SimWorker, ValkeyServer, until, until_async

from turnmill import BlockingClient, Client, Turn
from turnmill.errors import (
    ClientClosed,
    QueueFull,
    RecordError,
    RedisAway,
    RedisUnusable,
    UsageError,
)
from turnmill.reply import Failure, Reply
from turnmill.settings import Farm

WorkerFactory = Callable[..., SimWorker]
ClientFactory = Callable[..., Client]


def turn(content: str = "Hello", **fields: Any) -> Turn:
    messages = [{"role": "user", "content": content}]
    return Turn.model_validate({"model": "m", "messages": messages, **fields})


def turns(count: int) -> list[Turn]:
    return [turn(f"{number}") for number in range(count)]


def said(ending: object) -> object:
    assert isinstance(ending, Reply), ending
    return ending.message.content


@pytest.fixture
async def connect(farm: Farm) -> AsyncIterator[ClientFactory]:
    clients: list[Client] = []

    def make(run: str = "run", **options: Any) -> Client:
        clients.append(Client(farm.url, namespace=farm.namespace, run=run, **options))
        return clients[-1]

    yield make
    for one in clients:
        await one.close()


@pytest.fixture
def hand(by_hand: ByHand) -> Hand:
    return by_hand.hand()


async def claims(hand: Hand, count: int = 1) -> None:
    """The hand takes so many turns, as they come."""

    async def taken() -> bool:
        await hand.claim(count - len(hand.held))
        return len(hand.held) == count

    await until_async(taken, f"{count} turns are claimed")


async def answer_all(hand: Hand) -> None:
    for claim in list(hand.held.values()):
        await hand.answer(claim, f"to {claim.hash[:4]}")


# With a worker


async def test_asked_and_answered(worker: WorkerFactory, connect: ClientFactory) -> None:
    worker("--served-name", "m")
    client = connect()
    assert said(await client.ask(turn("Hello there"))) == "Hello there"
    hash = await client.submit(turn("again"))
    assert hash == turn("again").hash
    reply = await client.wait(hash, timeout=30)
    assert said(reply) == "again"
    assert await client.reply(hash) == await client.result(hash) == reply
    trace = await client.trace(hash)
    assert trace is not None
    assert trace.engine is not None
    assert (trace.hash, trace.outcome, trace.engine.engine) == (hash, "completed", "sim")
    status = await client.status()
    assert [info.model for info in status.workers] == ["m"]
    assert status.queues["m"].running == 0
    (run,) = status.runs
    assert (run.name, run.total, run.done) == ("run", 2, 2)


async def test_thousands_wait_at_once(worker: WorkerFactory, connect: ClientFactory) -> None:
    worker("--served-name", "m", "--slots", "200")
    client, many = connect(), turns(3000)
    endings = await asyncio.gather(*(client.ask(one) for one in many))
    assert [said(ending) for ending in endings] == [str(number) for number in range(3000)]
    # And again, by one who has not asked: from the store.
    hashes = [one.hash for one in many]
    found = await connect("other").wait_many(hashes[:500], timeout=30)
    assert [said(found[hash]) for hash in hashes[:500]] == [str(number) for number in range(500)]
    (run,) = (await client.status()).runs
    assert (run.total, run.done) == (3000, 3000)


def test_without_an_event_loop(worker: WorkerFactory, farm: Farm) -> None:
    worker("--served-name", "m")
    with BlockingClient(farm.url, namespace=farm.namespace, run="run") as client:
        assert said(client.ask(turn())) == "Hello"
        hashes = client.submit_many(turns(20))
        assert [said(one) for one in client.wait_many(hashes, 30).values()] == [
            str(number) for number in range(20)
        ]
        hash = client.submit(turn("alone"))
        assert client.wait(hash, 30) == client.result(hash) == client.reply(hash)
        assert client.trace(hash) is not None
        assert client.cancel([hash]) == 0
        assert client.status().runs[0].done == 22
        with pytest.raises(UsageError, match="is known here"):
            client.wait("0" * 64)

        # From several threads at once.
        heard: list[object] = []
        threads = [
            threading.Thread(target=lambda one=one: heard.append(said(client.ask(one))))
            for one in (turn(f"thread {number}") for number in range(8))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(map(str, heard)) == [f"thread {number}" for number in range(8)]
    client.close()


async def test_it_waits_through_a_restart_of_redis(
    worker: WorkerFactory, own_valkey: Callable[..., ValkeyServer]
) -> None:
    server = own_valkey(appendfsync="always")
    worker("--served-name", "m", farm=Farm(server.url), sim=("--latency", "0.3"))
    async with Client(server.url, run="run", poll_seconds=0.5) as client:
        waiting = [asyncio.ensure_future(client.ask(one)) for one in turns(100)]
        await until_async(lambda: _running(client), "some are running")
        server.kill()
        late = asyncio.ensure_future(client.ask(turn("asked while it was away")))
        server.start()
        assert [said(one) for one in await asyncio.gather(*waiting)] == [
            str(number) for number in range(100)
        ]
        assert said(await late) == "asked while it was away"


async def _running(client: Client) -> bool:
    return (await client.queue.depth("m")).running > 0


# By hand


async def test_asks_of_one_moment_travel_together(
    connect: ClientFactory, client: Redis, by_hand: ByHand
) -> None:
    asking = connect()
    calls = "cmdstat_evalsha"
    await asking.submit(turn("first"))
    before = (await client.info("commandstats"))[calls]["calls"]
    await asyncio.gather(*(asking.submit(one) for one in turns(200)))
    assert (await client.info("commandstats"))[calls]["calls"] - before == 1
    assert (await by_hand.counters()).total == 201


async def test_the_same_turn_asked_twice_is_one_turn(
    connect: ClientFactory, hand: Hand, by_hand: ByHand
) -> None:
    client = connect()
    first, second = (asyncio.ensure_future(client.ask(turn())) for _ in range(2))
    await claims(hand)
    await answer_all(hand)
    assert await first == await second
    assert (await by_hand.counts()) == (1, 1, 0, 0)


async def test_endings_come_in_the_order_in_which_they_end(
    connect: ClientFactory, hand: Hand
) -> None:
    client = connect()
    hashes = await client.submit_many(turns(5))
    await claims(hand, 5)
    backwards, seen = list(reversed(hashes)), []
    coming = client.as_ended(hashes, timeout=30)
    for hash in backwards:
        await hand.answer(hand.held[hash])
        ended, _ = await anext(coming)
        seen.append(ended)
    assert seen == backwards


async def test_a_turn_of_another_client_can_be_waited_for(
    connect: ClientFactory, hand: Hand, by_hand: ByHand
) -> None:
    hash = await connect("one").submit(turn())
    other = connect("two")
    waiting = asyncio.ensure_future(other.wait(hash))
    await claims(hand)
    await until_async(lambda: _joined(by_hand, "two"))
    # The first one leaves; the turn goes on for who waits.
    await connect("one").cancel([hash])
    await answer_all(hand)
    assert said(await waiting) == f"to {hash[:4]}"


async def _joined(by_hand: ByHand, run: str) -> bool:
    return run in {info.name for info in await by_hand.store.runs()}


async def test_of_an_unknown_hash_nothing_is_waited_for(connect: ClientFactory) -> None:
    client = connect()
    with pytest.raises(UsageError, match="no turn 0000"):
        await client.wait("0" * 64)
    assert await client.result("0" * 64) is None
    assert await client.reply("0" * 64) is None
    assert await client.trace("0" * 64) is None
    assert await client.cancel(["0" * 64]) == 0


async def test_a_wait_that_is_too_long_ends_and_the_turn_goes_on(
    connect: ClientFactory, hand: Hand
) -> None:
    client = connect()
    hash = await client.submit(turn())
    tasks = asyncio.all_tasks()
    for waiting in (client.wait(hash, 0.01), client.wait_many([hash], 0.01)):
        with pytest.raises(TimeoutError):
            await waiting
    assert asyncio.all_tasks() <= tasks  # nobody is left who waits
    await claims(hand)
    await answer_all(hand)
    assert isinstance(await client.wait(hash, 30), Reply)


async def test_a_cancelled_waiter_takes_nothing_from_the_others(
    connect: ClientFactory, hand: Hand
) -> None:
    client = connect()
    stays, leaves = (asyncio.ensure_future(client.ask(turn())) for _ in range(2))
    await claims(hand)
    leaves.cancel()
    await answer_all(hand)
    assert isinstance(await stays, Reply)


async def test_who_waits_for_a_cancelled_turn_is_told(connect: ClientFactory) -> None:
    client = connect()
    waiting = asyncio.ensure_future(client.ask(turn()))
    hash = await client.submit(turn())
    assert await client.cancel([hash]) == 1
    ending = await asyncio.wait_for(waiting, 30)
    assert isinstance(ending, Failure)
    assert ending.kind == "cancelled"
    assert await client.result(hash) == ending
    # Asked afresh it is a turn like any other.
    assert await client.submit(turn()) == hash
    assert await client.result(hash) is None


async def test_the_whole_run_can_be_cancelled_by_another_client(
    connect: ClientFactory, hand: Hand
) -> None:
    client = connect()
    waiting = asyncio.ensure_future(client.ask(turn()))
    await claims(hand)
    await connect().queue.cancel("m", "run")
    await hand.renew()
    ending = await asyncio.wait_for(waiting, 30)
    assert isinstance(ending, Failure)
    assert ending.kind == "cancelled"


async def test_a_failure_is_an_ending_and_asked_afresh_another_try(
    connect: ClientFactory, hand: Hand
) -> None:
    client = connect()
    waiting = asyncio.ensure_future(client.ask(turn()))
    await claims(hand)
    await hand.fail(hand.held[turn().hash])
    ending = await waiting
    assert isinstance(ending, Failure)
    assert (ending.kind, ending.text) == ("engine_error", f"{hand.id} failed")
    assert await client.wait(turn().hash) == ending
    again = asyncio.ensure_future(client.ask(turn()))
    await claims(hand)
    await answer_all(hand)
    assert isinstance(await again, Reply)


async def test_what_failed_for_good_is_asked_again_only_on_purpose(
    connect: ClientFactory, hand: Hand
) -> None:
    client = connect()
    waiting = asyncio.ensure_future(client.ask(turn()))
    await claims(hand)
    await hand.fail(hand.held[turn().hash], "invalid_request")
    assert await waiting == await client.ask(turn())
    again = asyncio.ensure_future(client.ask(turn(), retry_failed=True))
    await claims(hand)
    await answer_all(hand)
    assert isinstance(await again, Reply)


async def test_the_state_in_which_an_ask_found_its_turn(connect: ClientFactory, hand: Hand) -> None:
    client = connect()
    first = asyncio.ensure_future(client.ask_stating(turn()))
    await claims(hand)
    await answer_all(hand)
    assert (await first)[0] == "queued"
    assert (await connect("other").ask_stating(turn()))[0] == "answered"


async def test_a_deadline_ends_the_wait(connect: ClientFactory, hand: Hand) -> None:
    waiting = asyncio.ensure_future(connect(deadline=0.05).ask(turn()))

    async def told() -> bool:
        await hand.renew()
        return waiting.done()

    await until_async(told)
    ending = await waiting
    assert isinstance(ending, Failure)
    assert ending.kind == "deadline"


async def test_going_turns_and_larger_priorities_go_ahead(
    connect: ClientFactory, hand: Hand
) -> None:
    usual = connect("usual")
    await usual.submit(turn("new"))
    await usual.submit(turn("going"), going=True)
    await connect("urgent", priority=9).submit(turn("urgent"))
    taken = await hand.claim(3)
    assert taken.hashes == [turn(name).hash for name in ("urgent", "going", "new")]


# Healing


async def forget(by_hand: ByHand, hash: str) -> None:
    """A failover loses the ask: body, waiters and hint."""
    keys = by_hand.keys
    await by_hand.redis.delete(
        keys.body(hash), f"{keys.prefix}w:{hash}", keys.new("m", "5", "run"), keys.ready("m", "5")
    )


async def test_a_lost_ask_is_asked_again(
    connect: ClientFactory, by_hand: ByHand, hand: Hand
) -> None:
    client = connect(poll_seconds=0.1)
    waiting = asyncio.ensure_future(client.ask(turn()))
    await client.submit(turn())
    await forget(by_hand, turn().hash)
    assert not (await hand.claim()).claims
    await claims(hand)
    assert hand.held[turn().hash].body == turn().body
    await answer_all(hand)
    assert isinstance(await waiting, Reply)


async def test_an_ending_that_the_stream_did_not_tell_is_found(
    connect: ClientFactory, by_hand: ByHand, hand: Hand
) -> None:
    client = connect(poll_seconds=0.1)
    waiting = asyncio.ensure_future(client.ask(turn()))
    await claims(hand)
    async with by_hand.redis.pipeline(transaction=True) as lost:
        # The reply is there, and no event ever tells of it.
        claim = hand.held[turn().hash]
        other = ByHand(by_hand.redis, Farm(by_hand.farm.url, f"{by_hand.farm.namespace}x")).hand()
        await other.answer(claim)
        reply = await by_hand.redis.get(other.farm.keys.reply(claim.hash))
        lost.set(by_hand.keys.reply(claim.hash), reply)
        await lost.execute()
    assert isinstance(await asyncio.wait_for(waiting, 30), Reply)


async def test_a_poll_does_not_undo_a_cancel_of_another_client(
    connect: ClientFactory, by_hand: ByHand
) -> None:
    client = connect(poll_seconds=0.05)
    waiting = asyncio.ensure_future(client.ask(turn()))
    await client.submit(turn())
    await by_hand.queue.cancel("m", "run", [turn().hash])
    ending = await asyncio.wait_for(waiting, 30)
    assert isinstance(ending, Failure)
    assert await by_hand.counts() == (1, 0, 0, 1)


async def test_a_record_that_cannot_be_read_is_its_waiter_s_error_alone(
    connect: ClientFactory, by_hand: ByHand, hand: Hand
) -> None:
    client = connect(poll_seconds=0.1)
    good, bad = (asyncio.ensure_future(client.ask(turn(name))) for name in ("good", "bad"))
    await claims(hand, 2)
    await by_hand.redis.set(by_hand.keys.reply(turn("bad").hash), b"damaged")
    await hand.answer(hand.held[turn("good").hash])
    assert isinstance(await asyncio.wait_for(good, 30), Reply)
    with pytest.raises(RecordError):
        await asyncio.wait_for(bad, 30)


# Redis refuses


async def test_a_wrong_password_is_final(own_valkey: Callable[..., ValkeyServer]) -> None:
    server = own_valkey(requirepass="secret")
    for url in (server.url, f"{server.url}?password=guess"):
        async with Client(url) as client:
            with pytest.raises(RedisUnusable):
                await client.ask(turn())
            with pytest.raises(RedisUnusable):
                await client.status()
    async with Client(f"{server.url}?password=secret") as client:
        await client.submit(turn())


async def test_patience_ends(own_valkey: Callable[..., ValkeyServer]) -> None:
    server = own_valkey()
    async with Client(server.url, patience=0.1) as client:
        await client.submit(turn())
        server.kill()
        with pytest.raises(RedisAway):
            await client.ask(turn("another"))
        with pytest.raises(RedisAway):
            await client.status()
        server.start()
        await client.submit(turn("another"))


async def test_a_full_redis_is_said(own_valkey: Callable[..., ValkeyServer]) -> None:
    server = own_valkey()
    async with Client(server.url, patience=0.1) as client:
        used = (await client.store.redis.info("memory"))["used_memory"]
        await client.store.redis.config_set("maxmemory", int(used * 1.1))
        with pytest.raises(QueueFull, match="Raise maxmemory"):
            await client.submit(turn())


async def test_closing_ends_what_waits(connect: ClientFactory) -> None:
    client = connect()
    waiting = asyncio.ensure_future(client.ask(turn()))
    await client.submit(turn())
    await client.close()
    with pytest.raises(ClientClosed):
        await waiting
    with pytest.raises(ClientClosed):
        await client.submit(turn())
    assert {task for task in asyncio.all_tasks() if task is not asyncio.current_task()} == set()


async def test_what_is_asked_again_after_a_cancel_is_asked_afresh(
    farm: Farm, worker: Callable[..., SimWorker]
) -> None:
    async with Client(farm.url, namespace=farm.namespace) as client:
        again = turn("once more")
        hash = await client.submit(again)
        assert await client.cancel([hash]) == 1
        await client.submit(again)
        worker("--served-name", "m")
        assert isinstance(await client.wait(hash), Reply)


def test_a_client_belongs_to_one_loop(farm: Farm) -> None:
    client = Client(farm.url, namespace=farm.namespace)
    asyncio.run(client.submit(turn("here")))
    with pytest.raises(UsageError, match="belongs to the event loop"):
        asyncio.run(client.submit(turn("there")))


@pytest.mark.parametrize(
    "wrong",
    [
        {"priority": 5.5},
        {"priority": True},
        {"priority": 10},
        {"weight": 0},
        {"weight": math.nan},
        {"weight": 1e-17},
        {"weight": 1e17},
        {"deadline": math.inf},
        {"deadline": 0},
    ],
)
def test_wrong_options_are_refused_by_name(farm: Farm, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Client(farm.url, **wrong)


def test_a_blocking_client_that_closes_leaves_no_thread_waiting(farm: Farm) -> None:
    client = BlockingClient(farm.url, namespace=farm.namespace)
    errors: list[Exception] = []

    def ask() -> None:
        try:
            client.ask(turn("never answered"))
        except ClientClosed as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: client.status().queues.get("m") and client.status().queues["m"].queued)
    client.close()
    thread.join(10)
    assert len(errors) == 1
    with pytest.raises(ClientClosed):
        client.status()
