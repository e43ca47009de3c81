"""`turnmill archive` and `turnmill restore`: what leaves Redis is in the file, whatever is killed."""

from __future__ import annotations

import json
import lzma
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.asyncio import Redis
from tests.acceptance.conftest import Cli
from tests.by_hand import ByHand, h
from tests.processes import SimWorker, ValkeyServer, until

from turnmill.archive import BATCH_EFFECTS, Archive
from turnmill.archive_file import (
    ARCHIVE_VERSION,
    ArchivedEffect,
    ArchivedTurn,
    ArchiveFile,
    ArchiveWriter,
    FailureText,
    Header,
    Trailer,
    as_record,
    as_text,
)
from turnmill.errors import BadInput, ManifestChanged, QueueFull, RunInUse, UsageError
from turnmill.ownership import sole_producer
from turnmill.settings import Farm
from turnmill.wire import COMPRESS_FROM, decode_turn, pack

Workers = Callable[..., SimWorker]


@pytest.fixture
def archive(by_hand: ByHand) -> Archive:
    return Archive(by_hand.redis, by_hand.keys, patience=5.0)


async def records(hand: ByHand) -> dict[str, Any]:
    """All that is stored, without what only the queue needs, and without the trail of finished turns."""
    found: dict[str, Any] = {}
    async for raw in hand.redis.scan_iter(f"{hand.farm.namespace}:*"):
        key = raw.decode().removeprefix(hand.keys.prefix)
        if key[:2] in {f"{kind}:" for kind in "brxfycw"} or key.split(":")[0] in (
            "run",
            "manifest",
            "engines",
            "journal",
        ):
            kind = (await hand.redis.type(raw)).decode()
            read = {
                "string": lambda key: hand.redis.get(key),
                "hash": lambda key: hand.redis.hgetall(key),
                "set": lambda key: hand.redis.smembers(key),
                "list": lambda key: hand.redis.lrange(key, 0, -1),
            }[kind]
            found[key] = await read(raw)
    turns = await hand.redis.smembers(hand.keys.turns(hand.model, "run"))
    return found | {"turns": turns, "runs": await hand.redis.smembers(hand.keys.runs)}


EFFECTS = {
    f"{number:032x}": pack(was)
    for number, was in enumerate([b"17", b"null", b'"' + b"x" * COMPRESS_FROM + b'"', b"\xff"])
}
"""Short, nothing, compressed, and damaged."""


async def a_run_of_every_kind(hand: ByHand) -> None:
    """Answered, failed, failed before it was answered, cancelled by one, out of time; long and no text."""
    worker = hand.hand()
    await hand.redis.set(hand.keys.manifest("run"), '{"v":1,"sampling":{"temperature":1.0}}')
    await hand.redis.sadd(hand.keys.engines("run"), '{"engine":"sim"}', '{"engine":"other"}')
    await hand.redis.hset(hand.keys.journal("run"), mapping=EFFECTS)
    await hand.enqueue("failed", "again", "left", weight=2.5)
    await hand.enqueue("long", body=pack(b'{"long":"' + b"x" * COMPRESS_FROM + b'"}'))
    await hand.enqueue("no text", body=b"\xff\xfe\x80")
    claims = {claim.hash: claim for claim in (await worker.claim()).claims}
    await worker.answer(claims[h("long")], "ß𝄞" * COMPRESS_FROM)
    await worker.answer(claims[h("no text")])
    await worker.fail(claims[h("failed")], "poison")
    await worker.fail(claims[h("again")])
    await hand.enqueue("again")
    await worker.answer(await worker.take_one("again"), "at last")
    await hand.cancel("left")
    await worker.let_go(claims[h("left")])


async def test_all_comes_back(by_hand: ByHand, archive: Archive, tmp_path: Path) -> None:
    await a_run_of_every_kind(by_hand)
    before = await records(by_hand)
    assert await by_hand.counts() == (5, 3, 1, 1)
    file = tmp_path / "run.jsonl.xz"
    done = await archive.archive("run", file)
    assert (done.turns, done.effects, done.dropped, done.left) == (5, 4, 4, 0)
    assert os.listdir(tmp_path) == [file.name]
    assert await records(by_hand) == {"turns": set(), "runs": set()}
    trailer = ArchiveFile(file).trailer
    assert (trailer.turns, trailer.done, trailer.failed, trailer.cancelled) == (5, 3, 1, 1)

    restored = await archive.restore(file)
    assert (restored.turns, restored.stored) == (5, 4)
    assert (restored.effects, restored.written) == (4, 4)
    assert await records(by_hand) == before
    again = await archive.restore(file)
    assert (again.stored, again.written) == (0, 0)
    assert await records(by_hand) == before
    assert await by_hand.poll("long", "failed", "left") == ["answered", "failed", "cancelled"]
    assert not (await by_hand.hand().claim()).claims


@pytest.mark.parametrize(
    "record",
    [b'{"v":1}', b"", b"Zap", b"\xff", pack(b'"' + b"a" * COMPRESS_FROM + b'"'), b'{"a":"\n\\n"}'],
)
def test_records_are_text_or_bytes(record: bytes) -> None:
    text = as_text(record)
    assert as_record(json.loads(json.dumps(text))) == record


async def test_what_another_run_holds_stays_and_wins(
    by_hand: ByHand, archive: Archive, tmp_path: Path
) -> None:
    worker, file = by_hand.hand(), tmp_path / "f"
    await by_hand.enqueue("shared", "redone", "lost")
    await by_hand.enqueue("shared", "redone", run="other")
    for claim in (await worker.claim()).claims:
        await worker.answer(claim, "old")
    assert (await archive.archive("run", file)).dropped == 1
    assert await by_hand.counts("other") == (2, 2, 0, 0)

    # Meanwhile: another answer to one, a failure of one, and a third is asked and at work.
    assert await by_hand.queue.forget(by_hand.model, [(h("redone"), "")]) == [1]
    await by_hand.enqueue("redone", "lost", run="other")
    claims = {claim.hash: claim for claim in (await worker.claim()).claims}
    await worker.answer(claims[h("redone")], "new")
    await archive.restore(file)
    replies = {name: await by_hand.store.reply(h(name)) for name in ("shared", "redone", "lost")}
    assert {name: reply and reply.message.content for name, reply in replies.items()} == {
        "shared": "old",
        "redone": "new",
        "lost": "old",
    }
    assert await by_hand.counts("other") == (3, 3, 0, 0)
    assert await by_hand.counts() == (3, 3, 0, 0)
    lost, _, _ = await worker.renew()
    assert lost == [h("lost")]
    assert await worker.answer(claims[h("lost")], "late") == 0
    assert await by_hand.counts() == (3, 3, 0, 0)


async def test_a_reply_in_the_file_replaces_a_failure(
    by_hand: ByHand, archive: Archive, tmp_path: Path
) -> None:
    worker = by_hand.hand()
    await by_hand.enqueue("a")
    await worker.answer(await worker.take_one("a"))
    await archive.archive("run", tmp_path / "f")
    await by_hand.enqueue("a", run="other")
    await worker.fail(await worker.take_one("a"))
    await archive.restore(tmp_path / "f")
    assert await by_hand.counts() == await by_hand.counts("other") == (1, 1, 0, 0)
    assert await by_hand.store.failure(h("a")) is None


async def test_engines_of_redis_and_of_the_file(
    by_hand: ByHand, archive: Archive, tmp_path: Path
) -> None:
    """What only an older file has may be from an engine that Redis no longer knows of."""
    engines = by_hand.keys.engines("run")
    for number in range(2):
        await by_hand.redis.sadd(engines, f'{{"engine":"{number}"}}')
        await by_hand.enqueue(f"turn {number}")
        await by_hand.cancel()
        await archive.archive("run", tmp_path / "f")
        assert not await by_hand.redis.exists(engines)
    assert ArchiveFile(tmp_path / "f").header.engines == ['{"engine":"0"}', '{"engine":"1"}']


async def test_effects_of_redis_and_of_the_file(
    by_hand: ByHand, archive: Archive, tmp_path: Path
) -> None:
    """What is in Redis wins, and what only an older file has is taken over."""
    file, journal = tmp_path / "f", by_hand.keys.journal("run")
    await by_hand.redis.set(by_hand.keys.manifest("run"), "{}")
    old = {f"{number:032x}": b"1" for number in range(500)}
    new = {f"{number:032x}": b"2" for number in range(400, 700)}
    await by_hand.redis.hset(journal, mapping=old)
    assert (await archive.archive("run", file, keep_stored=True)).effects == 500
    assert await by_hand.redis.hlen(journal) == 500
    await by_hand.redis.delete(journal)
    await by_hand.redis.hset(journal, mapping=new)
    restored = await archive.restore(file)
    assert (restored.effects, restored.written) == (500, 400)
    every = {name.encode(): was for name, was in (old | new).items()}
    assert await by_hand.redis.hgetall(journal) == every

    await by_hand.redis.hdel(journal, *old.keys() - new.keys())
    assert (await archive.archive("run", file)).effects == 700
    assert not await by_hand.redis.exists(journal)
    await archive.restore(file)
    assert await by_hand.redis.hgetall(journal) == every


async def test_a_redis_that_fills_up_has_no_effect_twice(
    tmp_path: Path, own_valkey: Callable[..., ValkeyServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, farm = tmp_path / "f", Farm(own_valkey().url)
    client = farm.connect()
    archive, journal = Archive(client, farm.keys, patience=0.2), farm.keys.journal("run")
    effects = {f"{number:032x}": b"%d" % number for number in range(500)}
    await client.set(farm.keys.manifest("run"), "{}")
    await client.hset(journal, mapping=effects)
    await archive.archive("run", file)
    await client.config_set("maxmemory", 1000)
    with pytest.raises(QueueFull, match="raise maxmemory"):
        await archive.restore(file)
    assert await client.dbsize() == 0
    real = Archive._restore_effects

    async def fills_up(self: Archive, *arguments: Any) -> int:
        written = await real(self, *arguments)
        await client.config_set("maxmemory", 1000)
        return written

    monkeypatch.setattr(Archive, "_restore_effects", fills_up)
    await client.config_set("maxmemory", 0)
    with pytest.raises(QueueFull):
        await archive.restore(file)
    there = await client.hgetall(journal)
    assert 0 < len(there) < 500
    monkeypatch.undo()
    await client.config_set("maxmemory", 0)
    assert (await archive.restore(file)).written == 500 - len(there)
    assert await client.hgetall(journal) == {k.encode(): v for k, v in effects.items()}
    await client.aclose(close_connection_pool=True)


async def test_effects_are_read_a_few_at_a_time(
    by_hand: ByHand, archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    real = ArchiveWriter.add_effects

    def add(self: ArchiveWriter, effects: Sequence[ArchivedEffect]) -> None:
        seen.append(len(effects))
        real(self, effects)

    monkeypatch.setattr(ArchiveWriter, "add_effects", add)
    await by_hand.redis.set(by_hand.keys.manifest("run"), "{}")
    some = {f"{number:032x}": b'"%s"' % (b"x" * 100) for number in range(3000)}
    await by_hand.redis.hset(by_hand.keys.journal("run"), mapping=some)
    await archive.archive("run", tmp_path / "f")
    assert sum(seen) == 3000
    assert max(seen) < 3 * BATCH_EFFECTS


async def test_a_file_of_version_1_is_restored(
    by_hand: ByHand, archive: Archive, tmp_path: Path
) -> None:
    """It had no effects."""
    file = tmp_path / "old"
    file.write_bytes(lzma.compress(Path(__file__).with_name("archive_v1.jsonl").read_bytes()))
    restored = await archive.restore(file)
    assert (restored.run, restored.turns, restored.stored) == ("ferry", 1, 1)
    assert restored.effects == 0
    # Another archive into the same file is of this version.
    await archive.archive("ferry", file)
    assert ArchiveFile(file).header.turnmill_archive == ARCHIVE_VERSION
    assert (await archive.restore(file)).stored == 1


async def test_what_changed_after_it_was_written_is_not_freed(
    by_hand: ByHand, archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, file = by_hand.hand(), tmp_path / "f"
    await by_hand.enqueue("a", "b")
    for claim in (await worker.claim()).claims:
        await worker.answer(claim, "old")
    real = Archive._free

    async def late(self: Archive, *arguments: Any) -> Any:
        await by_hand.queue.forget(by_hand.model, [(h("a"), "")])
        await by_hand.enqueue("a")
        await worker.answer(await worker.take_one("a"), "new")
        return await real(self, *arguments)

    monkeypatch.setattr(Archive, "_free", late)
    done = await archive.archive("run", file)
    assert (done.dropped, done.left) == (1, 1)
    monkeypatch.undo()
    # Again: what Redis has now, and what only the file has.
    done = await archive.archive("run", file)
    assert (done.turns, done.dropped, done.left) == (2, 1, 0)
    await archive.restore(file)
    reply = await by_hand.store.reply(h("a"))
    assert reply is not None
    assert reply.message.content == "new"
    assert await by_hand.counts() == (2, 2, 0, 0)


async def test_cancelled_turns_that_nobody_cleared(
    by_hand: ByHand, archive: Archive, tmp_path: Path
) -> None:
    await by_hand.enqueue("a", "b")
    with pytest.raises(UsageError, match=r"'run' has open turns \(2\)"):
        await archive.archive("run", tmp_path / "f")
    assert not os.listdir(tmp_path)
    await by_hand.cancel()
    assert (await archive.archive("run", tmp_path / "f")).left == 0
    await archive.restore(tmp_path / "f")
    assert await by_hand.counts() == (2, 0, 0, 2)
    assert await by_hand.poll("a") == ["cancelled"]
    assert await by_hand.enqueue("a") == ["queued"]


async def test_refusals(
    by_hand: ByHand, archive: Archive, tmp_path: Path, client: Redis, farm: Farm
) -> None:
    file = tmp_path / "f"
    with pytest.raises(UsageError, match="there is no run 'run'"):
        await archive.archive("run", file)
    await a_run_of_every_kind(by_hand)
    async with sole_producer(client, farm.keys.producer("run"), "run"):
        with pytest.raises(RunInUse):
            await archive.archive("run", file)
    file.write_text("not ours")
    with pytest.raises(BadInput, match="no archive"):
        await archive.archive("run", file)
    assert file.read_text() == "not ours"
    file.unlink()
    await archive.archive("run", file, keep_stored=True)
    assert await by_hand.counts() == (5, 3, 1, 1)
    await by_hand.enqueue("x", run="other")
    await by_hand.cancel(run="other")
    with pytest.raises(UsageError, match="an archive of run 'run'"):
        await archive.archive("other", file)
    await client.set(farm.keys.manifest("run"), "{}")
    for work in (archive.archive("run", file), archive.restore(file)):
        with pytest.raises(ManifestChanged):
            await work
    assert await by_hand.counts() == (5, 3, 1, 1)


async def test_a_file_that_is_not_whole_is_refused_as_a_whole(
    by_hand: ByHand, archive: Archive, tmp_path: Path
) -> None:
    await a_run_of_every_kind(by_hand)
    good = tmp_path / "good"
    await archive.archive("run", good)
    empty = await records(by_hand)
    packed, lines = good.read_bytes(), lzma.decompress(good.read_bytes()).splitlines(keepends=True)

    def changed(number: int, old: bytes, new: bytes) -> bytes:
        line = lines[number].replace(old, new)
        assert line != lines[number]
        return lzma.compress(b"".join([*lines[:number], line, *lines[number + 1 :]]))

    bad = {
        "cut off": packed[: len(packed) // 2],
        "damaged": packed[:-20] + bytes([packed[-20] ^ 1]) + packed[-19:],
        "no archive": b"",
        "not xz": b"{}",
        "no trailer": lzma.compress(b"".join(lines[:-1])),
        "a line less": lzma.compress(b"".join([*lines[:6], *lines[7:]])),
        "a line twice": lzma.compress(b"".join([*lines[:6], *lines[5:]])),
        "more behind": lzma.compress(b"".join([*lines, lines[1]])),
        "half a line": lzma.compress(b"".join(lines)[:-20]),
        "other text": changed(5, b'"model":"m"', b'"model":"n"'),
        "newer": changed(0, b'"turnmill_archive":2', b'"turnmill_archive":3'),
        "an effect less": lzma.compress(b"".join([lines[0], *lines[2:]])),
        "another effect": changed(1, b'"was":"', b'"was":" '),
        "an effect too far": lzma.compress(b"".join([lines[0], *lines[2:6], lines[1], *lines[6:]])),
        "no hash": changed(6, b'{"hash":"', b'{"hash":"x'),
        "no text": changed(2, b'"was":"null"', b'"was":{}'),
        "something else": lzma.compress(b'{"v":1}\n'),
        "zeros": bytes(1 << 20),
    }
    file = tmp_path / "bad"
    for what, data in bad.items():
        file.write_bytes(data)
        with pytest.raises(BadInput) as refused:
            await archive.restore(file)
        assert str(refused.value).startswith(str(file)), what
        assert "\n" not in str(refused.value), what
        assert await records(by_hand) == empty, what
    with pytest.raises(BadInput, match="No such file"):
        await archive.restore(tmp_path / "nowhere")
    assert (await archive.restore(good)).turns == 5


@pytest.mark.parametrize(
    "fields", [{"weight": "0"}, {"weight": "much"}, {"weight": "1_0"}, {"manifest": "no JSON"}]
)
def test_what_would_harm_a_farm_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    header = Header.model_construct(run="run", made=1.0, **fields)
    with ArchiveWriter(tmp_path / "f", header) as writer:
        writer.finish()
        writer.publish()
    with pytest.raises(BadInput, match=f":1: damaged: {next(iter(fields))}"):
        ArchiveFile(tmp_path / "f")


def test_the_file_is_that_of_the_documents(tmp_path: Path) -> None:
    document = Path(__file__).parents[2] / "docs" / "formats.md"
    (text,) = re.findall(r"^```json archive\n(.*?)^```$", document.read_text(), re.M | re.S)
    file = tmp_path / "f"
    file.write_bytes(lzma.compress(text.encode()))
    archive = ArchiveFile(file)
    (turn,), *_ = archive.batches(10)
    ((effect,),) = archive.effects(10)
    assert [archive.header.line(), effect.line(), turn.line(), archive.trailer.line()] == [
        line.encode() for line in text.splitlines(keepends=True)
    ]
    assert turn.hash == decode_turn(as_record(turn.body)).hash
    named = set(re.findall(r"`(\w+)`", document.read_text().split("## Archives")[1]))
    models = (Header, ArchivedEffect, ArchivedTurn, FailureText, Trailer)
    assert {field for model in models for field in model.model_fields} <= named


# Real processes


def counters(cli: Cli, run: str = "r") -> dict[str, int]:
    runs = json.loads(cli("status", "--json").stdout)["runs"]
    return next((one for one in runs if one["name"] == run), {})


@pytest.mark.faults
def test_a_run_goes_on_on_an_empty_redis(
    on_farm: Cli, worker: Workers, own_valkey: Callable[..., ValkeyServer], make_cli: Any
) -> None:
    one = worker("--served-name", "m")
    # Draws, which a second time would be others.
    source = on_farm.write([{"id": f"c{i}", "turns": [f"{i}", "on"]} for i in range(150)])
    on_farm("run", str(source), "--run", "r", "--model", "m")
    before = (on_farm.folder / "runs/r/replies.jsonl").read_bytes()
    done = json.loads(on_farm("archive", "r", "--json").stdout)
    assert (done["turns"], done["dropped"], done["file"]) == (300, 300, "r.jsonl.xz")
    assert not counters(on_farm)
    assert "already" not in on_farm("archive", "r").stdout  # again: it is in the file
    one.kill()

    other = make_cli(Farm(own_valkey().url))
    assert other("restore", "r.jsonl.xz").stdout == "run r: 300 turns are back\n"
    shutil.rmtree(on_farm.folder / "runs")
    again = json.loads(other("run", str(source), "--run", "r", "--model", "m", "--json").stdout)
    assert (again["asked"], again["from_store"]) == (0, 300)
    assert (on_farm.folder / "runs/r/replies.jsonl").read_bytes() == before

    (on_farm.folder / "half.xz").write_bytes((on_farm.folder / done["file"]).read_bytes()[:-1000])
    said = other("restore", "half.xz", exits=2).stderr
    assert said.startswith("turnmill: half.xz: ")
    assert said.count("\n") == 1


@pytest.mark.faults
def test_no_effect_is_done_twice(
    on_farm: Cli,
    worker: Workers,
    own_valkey: Callable[..., ValkeyServer],
    make_cli: Any,
    farm: Farm,
) -> None:
    """Archived in the middle, and restored into another Redis, where the same command goes on."""
    sim = ("--answer", "chain", "--answer-tokens", "3")
    one = worker(sim=sim)
    source = on_farm.write([{"id": f"d{i}"} for i in range(6)])
    log, sandbox = on_farm.folder / "log", on_farm.folder / "sandbox"
    sandbox.mkdir()
    given = {"sandbox": sandbox, "log": log, "pause": 0.2}
    options = [part for name, value in given.items() for part in ("--set", f"{name}={value}")]
    scaffold = ("--scaffold", "tests.acceptance.dicing:dicing", *options, "--concurrency", "2")
    line = ("run", str(source), "--run", "r", *scaffold, "--json")
    process = on_farm.start(*line)
    until(lambda: log.exists() and len(log.read_text().splitlines()) >= 9, "some are under way")
    process.kill()
    process.wait()
    until(
        lambda: counters(on_farm)["done"] == counters(on_farm)["total"],
        "what it had asked is answered",
    )
    with redis.Redis.from_url(farm.url) as connection:
        written = connection.hgetall(farm.keys.journal("r"))
    done = json.loads(on_farm("archive", "r", "--json").stdout)
    assert done["effects"] == len(written) >= 12
    with redis.Redis.from_url(farm.url) as connection:
        assert not connection.exists(farm.keys.journal("r"))
    one.kill()

    other = Farm(own_valkey().url)
    there = make_cli(other)
    assert f"{done['effects']} effects are back" in there("restore", done["file"]).stdout
    with redis.Redis.from_url(other.url) as connection:
        assert connection.hgetall(other.keys.journal("r")) == written
    for path in sandbox.iterdir():
        path.unlink()
    shutil.rmtree(there.folder / "runs")
    thrown = Counter(log.read_text().splitlines())
    worker(sim=sim, farm=other)
    report = json.loads(there(*line).stdout)
    assert report["endings"] == {"thrown": 6}
    assert report["from_store"] >= done["turns"] - 2
    after = Counter(log.read_text().splitlines())
    assert len(after) == 24
    # Two were under way when it was killed; all others of before are not thrown again.
    assert sum(after[one] > 1 for one in thrown) <= 2
    for result in map(json.loads, (there.folder / "runs/r/replies.jsonl").read_text().splitlines()):
        assert len(result["details"]["seen"][-1].splitlines()) == 4
        assert "done_again_differently" not in result["details"]


KILLED = """
import os, sys
from turnmill import archive, archive_file, queue
where, number = sys.argv[1], int(sys.argv[2])

def dies(holder, name):
    real = getattr(holder, name)
    left = [number]
    def call(*a, **k):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), 9)
        return real(*a, **k)
    setattr(holder, name, call)

{
    "write": lambda: dies(archive_file.ArchiveWriter, "add"),
    "read back": lambda: dies(archive_file.ArchiveFile, "_read_lines"),
    "publish": lambda: dies(archive_file.os, "replace"),
    "free": lambda: dies(queue.Queue, "forget"),
    "rest": lambda: dies(queue.Queue, "forget_rest"),
    "restore": lambda: dies(archive.Archive, "_restore"),
}[where]()
sys.argv = ["turnmill", *sys.argv[3:]]
from turnmill.cli import main
main()
"""


@pytest.mark.faults
def test_killed_anywhere_the_same_command_finishes(
    on_farm: Cli, worker: Workers, farm: Farm
) -> None:
    """SIGKILL before each kind of step; after each, file and Redis together have every answer."""
    worker("--served-name", "m")
    source = on_farm.write([{"id": f"c{i}", "turns": [f"{i}", "on"]} for i in range(250)])
    on_farm("run", str(source), "--run", "r", "--model", "m")
    file = on_farm.folder / "r.jsonl.xz"

    def replies() -> dict[str, bytes]:
        with redis.Redis.from_url(farm.url) as db:
            keys = list(db.scan_iter(f"{farm.namespace}:r:*", count=1000))
            return {key.decode()[-64:]: db.get(key) or b"" for key in keys}

    def in_file() -> dict[str, bytes]:
        if not file.exists():
            return {}
        batches = ArchiveFile(file).batches(200)
        return {turn.hash: as_record(turn.reply) for batch in batches for turn in batch}

    def killed(where: str, number: int, *command: str) -> None:
        process = subprocess.run(
            [sys.executable, "-c", KILLED, where, str(number), *command],
            cwd=on_farm.folder,
            env={**os.environ, "REDIS_URL": farm.url, "TURNMILL_NAMESPACE": farm.namespace},
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert process.returncode == -9, process.stderr

    every = replies()
    assert len(every) == 500
    for where, number in [("write", 2), ("read back", 1), ("publish", 1)]:
        killed(where, number, "archive", "r")
        assert replies() == every
        assert not file.exists()
    for where, number in [("free", 1), ("free", 2), ("write", 1), ("publish", 1), ("rest", 1)]:
        killed(where, number, "archive", "r")
        assert in_file() | replies() == every
        assert len(in_file()) == 500
    assert not replies()
    on_farm("archive", "r")
    assert in_file() == every
    assert not counters(on_farm)
    assert [path.name for path in on_farm.folder.glob("*.partial")] == []

    for number in (1, 2):
        killed("restore", number, "restore", file.name)
        assert len(replies()) == (number - 1) * 200
    on_farm("restore", file.name)
    assert replies() == every
    assert (counters(on_farm)["total"], counters(on_farm)["done"]) == (500, 500)
    again = json.loads(on_farm("run", str(source), "--run", "r", "--model", "m", "--json").stdout)
    assert (again["asked"], again["from_store"]) == (0, 500)


@pytest.mark.faults
def test_killed_at_random(on_farm: Cli, worker: Workers, farm: Farm) -> None:
    """The real processes, killed when they are somewhere."""
    worker("--served-name", "m")
    source = on_farm.write([{"id": f"c{i}", "turns": [f"{i}", "on"]} for i in range(500)])
    on_farm("run", str(source), "--run", "r", "--model", "m")
    with redis.Redis.from_url(farm.url) as db:
        size = db.scard(farm.keys.turns("m", "r"))
        file = on_farm.folder / "r.jsonl.xz"
        process = on_farm.start("archive", "r")
        until(lambda: db.scard(farm.keys.turns("m", "r")) < size, "it frees")
        process.kill()
        process.wait()
        assert ArchiveFile(file).trailer.turns == size == 1000
        on_farm("archive", "r")
        assert ArchiveFile(file).trailer.turns == size
        process = on_farm.start("restore", file.name)
        until(lambda: db.scard(farm.keys.turns("m", "r")), "it restores")
        process.kill()
        process.wait()
        on_farm("restore", file.name)
        assert db.scard(farm.keys.turns("m", "r")) == size
    again = json.loads(on_farm("run", str(source), "--run", "r", "--model", "m", "--json").stdout)
    assert (again["asked"], again["from_store"]) == (0, 1000)
