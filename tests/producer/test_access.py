"""The users of docs/operations.md on a real server: what they may do works, and what they may not is refused."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import NoPermissionError
from tests.acceptance.conftest import Cli
from tests.by_hand import ByHand, h
from tests.processes import SimWorker, ValkeyServer

from turnmill import Client, Delta, Failure, Message, Reply, Turn
from turnmill.keys import Keys
from turnmill.scripts import FORGET, RESTORE
from turnmill.settings import Farm
from turnmill_worker.scripts import FINISH

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
Workers = Callable[..., SimWorker]
TURN = Turn(model="m", messages=[Message(role="user", content="Hello")])


def rule(kind: str) -> list[str]:
    (line,) = re.findall(rf"^```text {kind}\nuser (.*)\n```$", OPERATIONS.read_text(), re.MULTILINE)
    return shlex.split(line)


@pytest.fixture
def server(own_valkey: Callable[..., ValkeyServer]) -> ValkeyServer:
    one = own_valkey()
    with redis.Redis.from_url(one.url) as admin:
        for kind in ("acl", "acl-producer"):
            admin.execute_command("ACL", "SETUSER", *rule(kind))
    return one


@pytest.fixture
def producer(server: ValkeyServer) -> Farm:
    return Farm(f"unix://producer:PASSWORD@{server.socket}")


@pytest.fixture
def whole(server: ValkeyServer) -> Farm:
    return Farm(f"unix://turnmill:PASSWORD@{server.socket}")


@pytest.fixture
def limited(producer: Farm) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(producer.url) as connection:
        yield connection


async def test_a_producer_asks_and_reads(producer: Farm, whole: Farm, worker: Workers) -> None:
    worker("--served-name", "m", farm=whole)
    async with Client(producer.url) as client:
        ending = await client.ask(TURN)
        assert isinstance(ending, Reply)
        assert await client.trace(TURN.hash)
        status = await client.status()
        assert status.workers
        assert status.runs[0].done == 1


async def test_a_producer_reads_along_and_may_leave(
    producer: Farm, whole: Farm, worker: Workers
) -> None:
    worker("--served-name", "m", sim=("--tokens-per-second", "20"), farm=whole)
    words = " ".join(str(number) for number in range(1000))
    turn = Turn(model="m", messages=[Message(role="user", content=words)])
    async with Client(producer.url) as client:
        pieces = client.stream(turn)
        assert isinstance(await anext(pieces), Delta)
        await client.cancel([turn.hash])
        async for piece in pieces:
            assert isinstance(piece, Delta | Failure)


async def test_a_producer_asks_again_and_cancels(producer: Farm, whole: Farm) -> None:
    connection, workers = producer.connect(), whole.connect()
    asking, at_work = ByHand(connection, producer), ByHand(workers, whole)
    hand = at_work.hand()
    await asking.enqueue("fails", "left", "later", deadline=60)
    await hand.fail((await hand.claim(1)).claims[0])
    assert await asking.enqueue("fails") == ["queued"]
    assert await asking.cancel("left") == 1
    assert await asking.cancel() > 0
    assert await asking.queue.depth(asking.model)
    for one in (connection, workers):
        await one.aclose(close_connection_pool=True)


def test_a_run_of_a_producer(
    producer: Farm, whole: Farm, worker: Workers, make_cli: Callable[..., Cli]
) -> None:
    worker("--served-name", "m", farm=whole)
    cli = make_cli(producer)
    source = str(cli.conversations(3))
    cli("run", source, "--run", "r", "--model", "m", "--keep", "7d")
    cli("status")
    for command in (("forget", "r", "--yes"), ("archive", "r")):
        said = cli(*command, exits=3).stderr
        assert "may not drop replies" in said
    restored = cli(
        "restore", "r.jsonl.xz", exits=3
    ).stderr  # the archive is written, nothing is freed
    assert "may not write replies" in restored
    people = make_cli(whole)
    assert "Everything was answered" in cli("run", source, "--run", "r", "--model", "m").stdout
    people("archive", "r")
    assert "9 turns are back" in people("restore", "r.jsonl.xz").stdout
    assert "9 answers dropped" in people("forget", "r", "--yes").stdout


async def test_a_producer_cannot_forge(producer: Farm, whole: Farm, limited: redis.Redis) -> None:
    connection, workers = producer.connect(), whole.connect()
    asking, at_work = ByHand(connection, producer), ByHand(workers, whole)
    hand = at_work.hand()
    await asking.enqueue("answered", "open")
    await hand.answer((await hand.claim(1)).claims[0])
    keys = Keys()
    reply, counts = await at_work.store.reply(h("answered")), await at_work.counts()
    direct: list[tuple[Any, ...]] = [
        ("SET", keys.reply(h("open")), "forged"),
        ("DEL", keys.reply(h("answered"))),
        ("EXPIRE", keys.reply(h("answered")), 1),
        ("RENAME", keys.body(h("open")), keys.reply(h("open"))),
        ("COPY", keys.body(h("open")), keys.reply(h("open"))),
        ("SET", keys.trace(h("open")), "forged"),
        ("SET", "other:key", "1"),
        ("GET", "other:key"),
        ("FLUSHALL",),
        ("CONFIG", "GET", "*"),
        ("KEYS", "*"),
        ("EVAL", "return redis.call('SET', 'turnmill:r:x', '1')", 0),
        ("EVAL", "return redis.call('SET', KEYS[1], '1')", 1, "turnmill:r:x"),
    ]
    for command in direct:
        with pytest.raises((NoPermissionError, redis.ResponseError), match=r"permission|ACL"):
            limited.execute_command(*command)
    pair = (keys.prefix, keys.queue("m"))
    forged = (h("open"), "0" * 24, "ok", "", "forged", "{}")
    scripts: list[tuple[Any, ...]] = [
        (FORGET, "", h("answered"), ""),
        (FORGET, "run", h("answered"), ""),
        (FORGET, "run"),
        (RESTORE, "run", "1", h("open"), "b", "forged", "", "", "", "51", "", 0),
    ]
    for script, *arguments in scripts:
        with pytest.raises(NoPermissionError, match="this user may not"):
            limited.execute_command("EVAL", script.text, 2, *pair, *arguments)
    with pytest.raises(redis.ResponseError, match="No permissions to access a key"):
        limited.execute_command("EVAL", FINISH.text, 2, *pair, *forged)
    assert await at_work.store.reply(h("answered")) == reply
    assert await at_work.store.reply(h("open")) is None
    assert await at_work.counts() == counts
    assert (await hand.claim()).hashes == [h("open")] or hand.held
    for one in (connection, workers):
        await one.aclose(close_connection_pool=True)
