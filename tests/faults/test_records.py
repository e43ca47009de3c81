"""Records that nobody should have written: a worker and a producer live, and say of each what is wrong.

Nothing that is read from Redis is ever run.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from tests.acceptance.conftest import Cli
from tests.batch import HASHING, MODEL
from tests.by_hand import ByHand, h
from tests.processes import SimWorker, until_async

from turnmill.client import Client
from turnmill.errors import NewerRecord, RecordError
from turnmill.reply import Failure, Reply
from turnmill.settings import Farm
from turnmill.turn import Message, Turn
from turnmill_worker.engines.sim import history_hash

pytestmark = pytest.mark.faults

Workers = Callable[..., SimWorker]


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def sim(client: Redis, farm: Farm) -> ByHand:
    """The queue that the workers of these tests serve."""
    return ByHand(client, farm, MODEL)


@pytest.fixture
async def asking(farm: Farm) -> AsyncIterator[Client]:
    async with Client(farm.url, namespace=farm.namespace, run="run", poll_seconds=0.3) as client:
        yield client


@pytest.fixture
def cli(tmp_path: Path, farm: Farm) -> Iterator[Cli]:
    one = Cli(tmp_path, farm)
    yield one
    for process in one.started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def turn(content: str) -> Turn:
    return Turn(model=MODEL, messages=[Message(role="user", content=content)])


def fields(**changed: Any) -> bytes:
    """A turn's body, as another writer may have written it."""
    body = {"v": 1, "model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
    return json.dumps(body | changed).encode()


UNREADABLE: dict[str, tuple[bytes, str]] = {
    "not JSON": (b"{", "not JSON"),
    "nothing at all": (b"\n", "not JSON"),
    "JSON of something else": (b"[1]", "not a JSON object"),
    "too deep": (b"[" * 100_000, "not JSON"),
    "no version": (b"{}", "no wire version"),
    "a version that is no number": (fields(v="1"), "no wire version"),
    "not a number": (fields(sampling={"temperature": float("nan")}), "not JSON"),
    "an infinite number": (fields(sampling={"temperature": float("inf")}), "not JSON"),
    "half a character, escaped": (fields(sample=0).replace(b"Hello", rb"\ud800"), "not JSON"),
    "half a character": (fields(sample=0).replace(b"Hello", b"\xed\xa0\x80"), "not JSON"),
    "not UTF-8": (fields(sample=0).replace(b"Hello", b"\xff\xfe"), "not JSON"),
    "not compressed": (b"Z" + b"junk", "damaged"),
    "compressed, and cut off": (b"Z" + zlib.compress(fields() * 100)[:-20], "damaged"),
    "compressed rubbish": (b"Z" + zlib.compress(b"rubbish"), "not JSON"),
    "another turn's": (fields(sample=7), "the stored body is that of turn"),
}
INVALID: dict[str, tuple[bytes, str]] = {
    "no messages": (b'{"v":1,"model":"sim"}', "messages"),
    "no message": (fields(messages=[]), "messages"),
    "a field of no turn": (fields(mesages=[]), "mesages"),
    "a message that is a number": (fields(messages=[1]), "messages.0"),
    "a temperature below zero": (fields(sampling={"temperature": -1}), "sampling.temperature"),
}


async def test_a_body_that_is_no_string_stops_nobody(
    asking: Client, worker: Workers, client: Redis, farm: Farm
) -> None:
    """Somebody has written a list under its name."""
    bad, good = turn("bad"), turn("good")
    await asking.submit_many([bad, good])
    await client.delete(farm.keys.body(bad.hash))
    await client.rpush(farm.keys.body(bad.hash), "x")  # type: ignore[misc]
    worker(sim=HASHING)
    failure, reply = await asyncio.gather(asking.wait(bad.hash, 20), asking.wait(good.hash, 20))
    assert isinstance(failure, Failure)
    assert failure.kind == "unreadable"
    assert isinstance(reply, Reply)


async def test_a_body_that_cannot_be_read_is_a_failure_that_says_why(
    sim: ByHand, asking: Client, worker: Workers, tmp_path: Path
) -> None:
    bomb = tmp_path / "executed"
    unreadable = UNREADABLE | {
        f"pickle {protocol}": (pickle.dumps(Bomb(bomb), protocol), "not JSON")
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    }
    for name, (body, _) in (unreadable | INVALID).items():
        await sim.enqueue(name, body=body)
    one = worker("--slots", "4", sim=HASHING)
    hashes = [h(name) for name in unreadable | INVALID]

    async def all_have_ended() -> bool:
        return len(await sim.store.endings("run", hashes)) == len(hashes)

    await until_async(all_have_ended, "each has ended")
    endings = await sim.store.endings("run", hashes)
    for name, (_, reason) in (unreadable | INVALID).items():
        failure = endings[h(name)]
        assert isinstance(failure, Failure), name
        assert failure.kind == ("invalid_request" if name in INVALID else "unreadable"), name
        assert reason in failure.text, name
        assert "\n" not in failure.text, name
        trace = await asking.trace(h(name))
        assert trace is not None
        assert (trace.outcome, trace.earlier) == ("failed", []), name
    assert not bomb.exists()
    assert isinstance(await asking.ask(turn("a good one")), Reply)
    assert one.process.poll() is None
    assert "Traceback" not in one.log
    total = len(unreadable) + len(INVALID)
    assert await sim.counts() == (total + 1, 1, total, 0)
    # Asked afresh, a turn whose body was damaged is answered.
    good = turn("mended")
    await sim.redis.set(sim.keys.body(good.hash), b"{")
    assert isinstance(await asking.ask(good), Failure)
    assert isinstance(await asking.ask(good), Reply)


async def test_a_message_of_50_megabytes_holds_up_nobody(asking: Client, worker: Workers) -> None:
    one = worker("--slots", "4", sim=(*HASHING, "--latency", "0.05"))
    huge = turn("x" * 50_000_000)
    other = turn("y" * 50_000_000 + " word" * 20_000)
    await asking.submit_many([huge, other])
    small = [turn(f"small {i}") for i in range(50)]
    for ending in await asyncio.gather(*(asking.ask(one) for one in small)):
        assert isinstance(ending, Reply)
    fits, capped = (await asking.wait_many([huge.hash, other.hash], 60)).values()
    assert isinstance(fits, Reply)
    assert fits.message.content == history_hash(huge.messages)
    assert isinstance(capped, Reply)
    assert capped.capped == "context"
    assert one.process.poll() is None


async def test_a_body_that_is_gone_is_sent_again_by_who_waits_for_it(
    sim: ByHand, asking: Client, worker: Workers
) -> None:
    waits = turn("waits")
    await asking.submit(waits)
    await sim.enqueue("nobody waits")
    await sim.redis.delete(sim.keys.body(waits.hash), sim.keys.body(h("nobody waits")))
    one = worker(sim=HASHING)
    assert isinstance(await asking.wait(waits.hash, 30), Reply)
    # Of the other only who asks for it can say what it was.
    assert await sim.poll("nobody waits") == ["unknown"]
    assert one.process.poll() is None


async def test_a_damaged_list_of_tries_costs_no_turn(
    sim: ByHand, asking: Client, worker: Workers
) -> None:
    for name in ("damaged", "not a try", "bytes"):
        await asking.submit(turn(name))
    for name, log in (("damaged", b"{"), ("not a try", b'{"a":1}'), ("bytes", b"\xff")):
        await sim.redis.hset(sim.keys.tries(turn(name).hash), "log", log)  # type: ignore[misc]
    one = worker("--slots", "1", sim=HASHING)
    for name in ("damaged", "not a try", "bytes"):
        assert isinstance(await asking.wait(turn(name).hash, 30), Reply)
    assert one.process.poll() is None


async def test_a_turn_of_a_newer_turnmill_is_left_and_shown(
    sim: ByHand, asking: Client, worker: Workers, cli: Cli
) -> None:
    one = worker("--slots", "2", sim=HASHING)
    await sim.enqueue("from tomorrow", body=fields(v=2, thoughts=["new"]))
    assert isinstance(await asking.ask(turn("of today")), Reply)

    async def is_left() -> bool:
        return (await asking.queue.depth(MODEL)).newer == 1

    await until_async(is_left, "the turn is left to a newer worker")
    assert await asking.result(h("from tomorrow")) is None
    assert "left to a newer worker: wire version 2" in one.log
    status = json.loads(cli("status", "--json").stdout)
    assert (status["queues"][MODEL]["due"], status["queues"][MODEL]["newer"]) == (1, 1)
    assert "1 (1 for a newer turnmill)" in cli("status", COLUMNS="200").stdout
    # Offered again and again it is no suspect.
    await sim.make_due(h("from tomorrow"))
    await until_async(is_left)
    depth = await asking.queue.depth(MODEL)
    assert (depth.queued, depth.running, depth.suspects) == (0, 0, 0)
    one.signal(signal.SIGTERM)
    assert one.wait() == 0


BAD_ENDINGS: dict[str, tuple[bytes, str]] = {
    "not JSON": (b"\x80\x04N.", "not JSON"),
    "newer": (b'{"v":2,"words":[]}', "wire version 2; this turnmill reads up to 1"),
    "not a reply": (b'{"v":1}', "hash: Field required"),
    "cut off": (b"Zx", "damaged"),
}


async def test_a_client_says_which_ending_it_cannot_read(sim: ByHand, asking: Client) -> None:
    await sim.enqueue("fine")
    hand = sim.hand()
    await hand.answer(await hand.take_one("fine"))
    for name, (record, reason) in BAD_ENDINGS.items():
        for kind in ("reply", "failure"):
            bad = turn(f"{kind} {name}")
            if kind == "reply":
                await sim.redis.set(sim.keys.reply(bad.hash), record)
            else:
                mapping = {"kind": "poison", "record": record}
                await sim.redis.hset(sim.keys.failure(bad.hash), mapping=mapping)  # type: ignore[misc]
            with pytest.raises(RecordError, match=f"^turn {bad.hash}: .*{reason}") as raised:
                await asking.ask(bad)
            assert isinstance(raised.value, NewerRecord) == (name == "newer")
            assert "\n" not in str(raised.value)
    assert isinstance(await asking.result(h("fine")), Reply)


async def test_a_run_ends_with_a_line_for_each_record_that_it_cannot_read(
    sim: ByHand, worker: Workers, cli: Cli, tmp_path: Path
) -> None:
    worker("--served-name", MODEL, "--slots", "4", sim=HASHING)
    source = cli.conversations(8, turns=2)
    line = ("run", str(source), "--run", "r", "--model", MODEL, "--json", "--max-failures", "8")
    assert json.loads(cli(*line).stdout)["outcomes"]["completed"] == 8
    first = [json.loads(text) for text in (tmp_path / "runs/r/replies.jsonl").open()]
    bomb = tmp_path / "executed"
    bad = [pickle.dumps(Bomb(bomb)), *(record for record, _ in BAD_ENDINGS.values())]
    for conversation, record in zip(first, bad, strict=False):
        await sim.redis.set(sim.keys.reply(conversation["turns"][1]["hash"]), record)
    # A trace says how a reply came; one that cannot be read takes nothing from it.
    for conversation in first[5:]:
        await sim.redis.set(sim.keys.trace(conversation["turns"][0]["hash"]), bad[0])
    report = json.loads(cli(*line).stdout)
    assert (report["outcomes"]["failed"], report["outcomes"]["completed"]) == (5, 3)
    assert [one["engine"] for one in report["engines"]] == ["sim"]
    again = [json.loads(text) for text in (tmp_path / "runs/r/replies.jsonl").open()]
    for conversation, reason in zip(
        again, ["not JSON", *(reason for _, reason in BAD_ENDINGS.values())], strict=False
    ):
        hash = first[again.index(conversation)]["turns"][1]["hash"]
        assert conversation["error"].startswith(f"turn {hash}: ")
        assert reason in conversation["error"]
    assert again[5:] == first[5:]
    assert not bomb.exists()
