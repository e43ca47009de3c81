"""One worker, several names: the engine's own, and one for each of its adapters. Real processes, a real queue."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from arq.connections import RedisSettings, create_pool
from tests.by_hand import ByHand
from tests.processes import SimWorker, ValkeyServer, until_async
from tests.worker.test_http import metrics, port_of

from turnmill.client import Client
from turnmill.doctor.farm import examine
from turnmill.reply import Reply, Times, Trace
from turnmill.settings import Farm
from turnmill.store import WorkerInfo
from turnmill.turn import Turn
from turnmill_worker.engines import load
from turnmill_worker.engines.base import Answer, Engine, EngineSettings, Progress
from turnmill_worker.engines.sim import follows
from turnmill_worker.worker import TurnWorker

pytestmark = pytest.mark.faults

Workers = Callable[..., SimWorker]

BOTH = ("--adapter", "a", "--adapter", "b")
NAMES = ("sim", "sim:a", "sim:b")


def turn(content: str = "Hello", model: str = "sim", **fields: Any) -> Turn:
    messages = [{"role": "user", "content": content}]
    return Turn.model_validate({"model": model, "messages": messages, **fields})


def many(count: int, model: str) -> list[Turn]:
    return [turn(f"{model} {number}", model) for number in range(count)]


@pytest.fixture
async def asking(farm: Farm) -> AsyncIterator[Client]:
    async with Client(farm.url, namespace=farm.namespace, run="run") as client:
        yield client


async def records(asking: Client) -> dict[str, WorkerInfo]:
    """By name, once all are there."""

    async def there() -> dict[str, WorkerInfo]:
        found = {info.model: info for info in await asking.store.workers()}
        return found if set(found) >= set(NAMES) else {}

    found: dict[str, WorkerInfo] = await until_async(there, "every name is registered")
    return found


async def content(asking: Client, asked: Turn) -> str:
    reply = await asking.ask(asked)
    assert isinstance(reply, Reply), reply
    assert isinstance(reply.message.content, str)
    return reply.message.content


async def trace(asking: Client, asked: Turn) -> Trace:
    found = await asking.trace(asked.hash)
    assert found is not None
    return found


async def running(asking: Client, **counts: int) -> None:
    """Wait until so many turns run of the plain model (`sim`) and of its adapters, by their names."""
    expected = {"sim" if name == "sim" else f"sim:{name}": n for name, n in counts.items()}

    async def reached() -> bool:
        depths = {model: (await asking.queue.depth(model)).running for model in expected}
        return depths == expected

    await until_async(reached, f"turns run: {expected}")


# What the farm sees


async def test_each_name_is_a_model_of_its_own(worker: Workers, asking: Client) -> None:
    one = worker("--slots", "3", "--revision", "r1", sim=BOTH)
    found = await records(asking)
    assert {info.pid for info in found.values()} == {one.pid}
    assert len({info.id for info in found.values()}) == len(found) == 3
    assert {info.slots for info in found.values()} == {3}
    assert {info.revision for info in found.values()} == {"r1"}
    adapters = {model: info.engine.adapter for model, info in found.items()}
    assert adapters == {"sim": None, "sim:a": "sim/a", "sim:b": "sim/b"}
    for model, says in {"sim": "Hello", "sim:a": "a: Hello", "sim:b": "b: Hello"}.items():
        assert await content(asking, turn(model=model)) == says
        made = await trace(asking, turn(model=model))
        assert (made.worker, made.engine) == (found[model].id, found[model].engine)


async def test_names_with_colons_are_not_taken_apart(worker: Workers, asking: Client) -> None:
    worker("--served-name", "llama3:8b", sim=("--adapter", "s3://bucket:1"))
    assert await content(asking, turn(model="llama3:8b")) == "Hello"
    assert await content(asking, turn(model="llama3:8b:s3://bucket:1")) == "s3://bucket:1: Hello"


async def test_an_adapter_that_nobody_has_waits(worker: Workers, asking: Client) -> None:
    worker(sim=BOTH)
    await asking.submit(turn(model="sim:c"))
    for model in NAMES:
        await content(asking, turn(model=model))
    assert (await asking.queue.depth("sim:c")).queued == 1
    checks = {check.name: check for check in await examine(asking.store.redis, asking.farm.keys)}
    assert checks["queues"].state == "bad"
    assert "1 of sim:c" in checks["queues"].says
    # One engine with adapters is not several engines of one model.
    assert checks["engines"].state == "ok"


async def test_a_turn_in_the_queue_of_another_name_is_refused(
    worker: Workers, asking: Client, farm: Farm, valkey: ValkeyServer
) -> None:
    worker(sim=BOTH)
    settings = RedisSettings(unix_socket_path=str(valkey.socket))
    arq = await create_pool(settings, default_queue_name=farm.keys.due("sim:a"))
    fields = turn(model="sim:b").model_dump(exclude_none=True)
    job = await arq.enqueue_job("answer_turn", fields)
    assert job is not None
    with pytest.raises(RuntimeError, match="'sim:b' was put into the queue of 'sim:a'"):
        await job.result(timeout=20, poll_delay=0.05)
    await arq.aclose()


async def test_stock_clients_of_arq_ask_adapters(
    worker: Workers, farm: Farm, valkey: ValkeyServer
) -> None:
    worker(sim=BOTH)
    arq = await create_pool(RedisSettings(unix_socket_path=str(valkey.socket)))
    for model, says in {"sim": "Hello", "sim:a": "a: Hello", "sim:b": "b: Hello"}.items():
        asked = {"messages": [{"role": "user", "content": "Hello"}]}
        job = await arq.enqueue_job("answer_turn", asked, _queue_name=farm.keys.due(model))
        assert job is not None
        reply = await job.result(timeout=20, poll_delay=0.05)
        assert reply["message"]["content"] == says
    await arq.aclose()


async def test_metrics_are_of_all_names(worker: Workers, asking: Client) -> None:
    one = worker("--http", "0", "--slots", "2", sim=(*BOTH, "--hang-if", "hang"))
    port = port_of(lambda: one.log)
    await records(asking)
    for model in NAMES:
        await content(asking, turn(model=model))
    await asking.submit_many([turn("hang", model) for model in NAMES])

    async def shown() -> bool:
        found = metrics(port)
        turns = found.get("turnmill_queue_turns", {})
        waiting = Counter[str]()
        for labels, count in turns.items():
            waiting[dict(labels)["state"]] += int(count)
        return (waiting["running"], waiting["queued"]) == (2, 1)

    await until_async(shown, "the queues of all names are shown")
    found = metrics(port)
    assert {dict(labels)["model"] for labels in found["turnmill_worker_info"]} == set(NAMES)
    assert found["turnmill_claimed_total"] == {(): 5}
    assert found["turnmill_running_turns"] == found["turnmill_engine_requests"] == {(): 2}
    assert found["turnmill_slots"] == {(): 2}
    assert found["turnmill_ready"] == {(): 1}


# The slots


class Watched:
    """An engine, and how many turns were in it at once: at most, and of how many names."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.most = self.names = 0
        self._inside = Counter[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def answer(self, turn: Turn, rid: str, progress: Progress) -> Answer:
        self._inside[turn.model] += 1
        self.most = max(self.most, self._inside.total())
        self.names = max(self.names, len(+self._inside))
        try:
            return await self._engine.answer(turn, rid, progress)
        finally:
            self._inside[turn.model] -= 1


async def test_all_names_together_take_all_slots_and_no_more(farm: Farm, asking: Client) -> None:
    speed = ("--latency", "0.01")
    engine = Watched(load("sim")(EngineSettings(slots=6, arguments=(*BOTH, *speed))))
    asked = [one for model in NAMES for one in many(100, model)]
    await asking.submit_many(asked)
    worker = TurnWorker(engine, farm)
    working = asyncio.create_task(worker.main())
    await asking.wait_many([one.hash for one in asked], 60)
    worker.stop()
    with contextlib.suppress(asyncio.CancelledError):
        worker.main_task = working
        await working
    await worker.close()
    assert (engine.most, engine.names) == (6, 3)


@pytest.mark.parametrize("slots", [1, 2, 8])
@pytest.mark.parametrize("late", NAMES)
async def test_who_comes_late_to_full_slots_does_not_wait_until_the_others_are_done(
    worker: Workers, asking: Client, slots: int, late: str
) -> None:
    worker("--slots", str(slots), sim=(*BOTH, "--latency", "0.01"))
    await records(asking)
    others = [model for model in NAMES if model != late]
    for model in others:
        await asking.submit_many(many(200 * slots, model))

    async def full() -> bool:
        depths = [await asking.queue.depth(model) for model in others]
        return sum(depth.running for depth in depths) == slots

    await until_async(full, "the slots are full")
    few = many(5, late)
    await asking.submit_many(few)
    await asking.wait_many([one.hash for one in few], 60)
    for model in others:
        assert (await asking.queue.depth(model)).queued > 0


# Suspects


async def suspect(by_hand: ByHand, asked: Turn, *, strikes: int = 2) -> None:
    """A turn that waits in its queue, and that so many workers have died with, alone."""
    for _ in range(strikes):
        hand = by_hand.hand()
        taken = await hand.claim(1)
        assert taken.hashes == [asked.hash]
        await hand.give_back(taken.claims[0], "death")
    assert (await by_hand.queue.depth(asked.model)).suspects == 1


def hands(asking: Client, model: str) -> ByHand:
    return ByHand(asking.store.redis, asking.farm, model)


async def times(asking: Client, asked: Sequence[Turn]) -> list[Times]:
    return [(await trace(asking, one)).times for one in asked]


def apart(one: Times, other: Times) -> bool:
    """Whether two turns were never in the worker at the same time."""
    times = [one.claimed, one.finished, other.claimed, other.finished]
    begun, ended, other_begun, other_ended = [at for at in times if at is not None]
    return ended <= other_begun or other_ended <= begun


@pytest.mark.parametrize("model", NAMES)
async def test_a_suspect_of_one_name_is_alone_in_the_engine(
    worker: Workers, asking: Client, model: str
) -> None:
    suspicious = turn("suspicious", model)
    await asking.submit(suspicious)
    await suspect(hands(asking, model), suspicious)
    others = [one for name in NAMES for one in many(8, name)]
    await asking.submit_many(others)
    worker("--slots", "8", sim=(*BOTH, "--latency", "0.3"))
    await asking.wait_many([suspicious.hash, *(one.hash for one in others)], 60)
    (its,) = await times(asking, [suspicious])
    for theirs in await times(asking, others):
        assert apart(its, theirs)


async def test_a_suspect_gets_an_empty_worker_though_others_keep_it_full(
    worker: Workers, asking: Client
) -> None:
    others = many(400, "sim:a")
    await asking.submit_many(others)
    worker("--slots", "4", sim=(*BOTH, "--latency", "0.05"))
    await running(asking, a=4)
    # One of each of the other names, so that they must take turns.
    suspicious = [turn("suspicious", model) for model in ("sim", "sim:b")]
    for one in suspicious:
        by_hand = hands(asking, one.model)
        hash = one.hash
        # As it is when it was struck in other workers, and has waited for an empty one.
        await asking.store.redis.hset(
            f"{asking.farm.keys.prefix}t:{hash}", mapping={"strikes": 2, "company": 1}
        )
        await asking.submit(one)
        await asking.store.redis.zadd(
            asking.farm.keys.suspects(one.model), {hash: time.time() * 1000 - 400_000}
        )
        assert (await by_hand.queue.depth(one.model)).suspects == 1
    await asking.wait_many([one.hash for one in suspicious], 60)
    assert (await asking.queue.depth("sim:a")).queued > 0
    first, second = await times(asking, suspicious)
    assert apart(first, second)
    await asking.wait_many([one.hash for one in others], 60)
    for theirs in await times(asking, others):
        assert apart(first, theirs)
        assert apart(second, theirs)


async def test_who_may_not_have_company_has_none_of_other_names_when_its_trial_is_over(
    worker: Workers, asking: Client, farm: Farm
) -> None:
    """A death would convict it, because in its own queue it would be the only one accused."""
    suspicious = turn("hang")
    await asking.submit(suspicious)
    await suspect(hands(asking, "sim"), suspicious)
    worker("--slots", "4", sim=(*BOTH, "--hang-if", "hang"))
    found = await records(asking)
    await running(asking, sim=1)
    await asking.submit_many([*many(2, "sim:a"), *many(2, "sim:b")])
    await asking.store.redis.delete(f"{farm.keys.queue('sim')}trial:{found['sim'].id}")
    # Its own name may go on; and does, long after the others could have.
    own = many(3, "sim")
    for one in own:
        await asking.ask(one)
    for model in ("sim:a", "sim:b"):
        depth = await asking.queue.depth(model)
        assert (depth.queued, depth.running) == (2, 0)
    await asking.cancel([suspicious.hash])
    await asking.wait_many([one.hash for model in NAMES[1:] for one in many(2, model)], 30)


# Its life


async def test_on_sigterm_turns_of_all_names_end_and_no_new_ones_begin(
    worker: Workers, asking: Client
) -> None:
    one = worker("--slots", "6", sim=(*BOTH, "--latency", "1"))
    await records(asking)
    asked = [one for model in NAMES for one in many(2, model)]
    await asking.submit_many(asked)
    await running(asking, sim=2, a=2, b=2)
    late = [turn("late", model) for model in NAMES]
    one.signal(signal.SIGTERM)
    await asking.submit_many(late)
    assert one.wait() == 0
    for done in asked:
        assert await asking.reply(done.hash) is not None
    for model in NAMES:
        depth = await asking.queue.depth(model)
        assert (depth.queued, depth.running) == (1, 0)
    assert await asking.store.workers() == []


@pytest.mark.parametrize("how", ["drain", "death", "lapse"])
async def test_turns_of_all_names_go_on_in_another_worker(
    worker: Workers, asking: Client, how: str
) -> None:
    chain = ("--answer", "chain", "--answer-tokens", "100", "--tokens-per-second", "50")
    sim = (*BOTH, *chain, "--die-if", "death")
    first = worker("--slots", "9", "--keep-every", "0.1", "--drain", "0", sim=sim)
    before = await records(asking)
    asked = [one for model in NAMES for one in many(2, model)]
    await asking.submit_many(asked)
    keys = asking.farm.keys

    async def all_kept() -> bool:
        redis = asking.store.redis
        return all([await redis.llen(keys.partial(one.hash)) > 2 for one in asked])  # type: ignore[misc]

    await until_async(all_kept, "something is kept of every answer")
    if how == "lapse":
        first.kill()
    elif how == "drain":
        first.signal(signal.SIGTERM)
        assert first.wait() == 0
    else:
        await asking.submit(turn("death", "sim:a"))
        assert first.wait() == 70
        await asking.cancel([turn("death", "sim:a").hash])
    worker("--slots", "9", sim=sim)
    await asking.wait_many([one.hash for one in asked], 60)
    for one in asked:
        made, reply = await trace(asking, one), await asking.reply(one.hash)
        assert [(t.worker, t.outcome) for t in made.earlier] == [(before[one.model].id, how)]
        assert made.resumed_at
        assert reply is not None
        words = str(reply.message.content).split()
        if one.model != "sim":
            assert words.pop(0) == f"{one.model.removeprefix('sim:')}:"
        assert all(follows(word) == after for word, after in itertools.pairwise(words))
        assert reply.usage.completion_tokens == 100
