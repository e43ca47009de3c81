"""A run remembers which engines it has met, and does not go on with another one unasked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.asyncio import Redis
from tests.acceptance.conftest import Cli
from tests.processes import SimWorker, until, until_async

from turnmill import Client
from turnmill.conversations import Conversation
from turnmill.engines_met import EnginesMet
from turnmill.output import RunFiles, read_results
from turnmill.rehearsal import Outlook, Rehearsal
from turnmill.reply import EngineIdentity
from turnmill.run import Run, RunEnd
from turnmill.run_settings import RunSettings
from turnmill.scaffolds.base import Ask, Ended, Scaffold
from turnmill.scaffolds.multi_turn_chat import multi_turn_chat
from turnmill.settings import Farm

Workers = Callable[..., SimWorker]

LINE = ("run", "in.jsonl", "--run", "r", "--model", "sim", "--json")


def served(revision: str) -> tuple[str, ...]:
    return ("--served-name", "sim", "--model", "m", "--revision", revision)


def revisions(report: str) -> list[str]:
    return sorted(engine["revision"] for engine in json.loads(report)["engines"])


def asked_by_the_run(cli: Cli) -> int:
    (run,) = json.loads(cli("status", "--json").stdout)["runs"]
    total: int = run["total"]
    return total


def remembered(farm: Farm) -> int:
    with redis.Redis.from_url(farm.url) as connection:
        count: int = connection.scard(farm.keys.engines("r"))
        return count


def test_a_resumed_run_does_not_go_on_with_another_engine(
    on_farm: Cli, worker: Workers, farm: Farm
) -> None:
    on_farm.conversations(3)
    first = worker(*served("one"))
    assert revisions(on_farm(*LINE).stdout) == ["one"]
    first.kill()
    worker(*served("two"))
    # What is all there is told, whoever lives: nothing of it will be mixed.
    assert json.loads(on_farm(*LINE).stdout)["from_store"] == 9
    assert json.loads(on_farm(*LINE, "--dry-run").stdout)["next"] == 0
    assert remembered(farm) == 1

    on_farm.conversations(4)
    more = (*LINE, "--extend")
    for line in (more, (*more, "--dry-run")):
        refused = on_farm(*line, exits=2).stderr
        assert len(refused.strip().splitlines()) == 1
        assert "met the engine sim 0.1.0, m, revision one, words, and now there is sim" in refused
        assert "revision two" in refused
    assert asked_by_the_run(on_farm) == 9

    assert json.loads(on_farm(*more, "--allow-mixed", "--dry-run").stdout)["next"] == 1
    mixed = on_farm(*more, "--allow-mixed")
    assert revisions(mixed.stdout) == ["one", "two"]
    assert "MIXED ENGINES" in mixed.stderr
    # It was taken once, and need not be taken again.
    on_farm.conversations(5)
    again = on_farm(*more[:-2], "--extend")
    assert "not of one engine" in again.stdout
    assert "revision two" in again.stdout
    on_farm("forget", "r", "--yes")
    assert remembered(farm) == 0


async def test_what_is_stored_is_gone_through_once(
    farm: Farm, tmp_path: Path, worker: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether there is anything to ask of another engine: of a long run that takes as long as the run."""
    looks = rehearsals = 0
    look_around, look = Run._look_around, Rehearsal.look

    async def counted(run: Run) -> None:
        nonlocal looks
        await look_around(run)
        looks += 1

    async def rehearse(rehearsal: Rehearsal) -> Outlook:
        nonlocal rehearsals
        rehearsals += 1
        return await look(rehearsal)

    async def drive(item: Conversation, ask: Ask) -> Ended:
        async def seen() -> bool:
            return rehearsals != 1 or not 0 < looks < 5

        await until_async(seen, "the run has looked around some times")
        return await multi_turn_chat.drive(item, ask)

    monkeypatch.setattr("turnmill.run.STORE_SECONDS", 0.02)
    monkeypatch.setattr("turnmill.run.REFRESH_SECONDS", 0.02)
    monkeypatch.setattr(Run, "_look_around", counted)
    monkeypatch.setattr(Rehearsal, "look", rehearse)
    items = [Conversation(id="c", turns=["a"])]
    scaffold = Scaffold(drive, multi_turn_chat.read)

    async def attempt() -> RunEnd:
        async with Client(farm.url, namespace=farm.namespace, run="r", patience=None) as client:
            with RunFiles(tmp_path / "r", "r") as files:
                return await Run(RunSettings("r", "sim"), items, scaffold, client, files).drive()

    first = await asyncio.to_thread(worker, *served("one"))
    assert (await attempt()).report.asked == 1
    first.kill()
    await asyncio.to_thread(worker, *served("two"))
    await until_async(lambda: asyncio.to_thread(_live_revisions, farm, ["two"]), "only two lives")
    looks = 0
    assert (await attempt()).report.from_store == 1
    assert looks >= 5
    assert rehearsals == 1


def test_an_engine_that_comes_on_the_way_is_warned_about(on_farm: Cli, worker: Workers) -> None:
    on_farm.write([{"id": f"c{i}", "turns": ["a", "b"]} for i in range(40)])
    worker(*served("one"), "--slots", "1", sim=("--latency", "0.2"))
    process = on_farm.start(*LINE)
    partial = on_farm.folder / "runs/r/replies.partial.jsonl"
    until(lambda: partial.exists() and partial.read_bytes(), "a conversation has ended")
    worker(*served("two"), "--slots", "2", sim=("--latency", "0.2"))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert err.count("MIXED ENGINES") == 1
    assert revisions(out) == ["one", "two"]
    assert on_farm(*LINE).returncode == 0


def test_another_engine_that_comes_first_stops_it(
    on_farm: Cli, worker: Workers, farm: Farm
) -> None:
    on_farm.conversations(3)
    first = worker(*served("one"))
    on_farm(*LINE)
    first.kill()
    until(lambda: not _live(farm), "the worker is known to be dead")
    on_farm.conversations(6)
    process = on_farm.start(*LINE, "--extend")
    until(lambda: asked_by_the_run(on_farm) == 12, "it has asked, and waits")
    # So slow that it answers nothing before it is seen.
    worker(*served("two"), sim=("--latency", "60"))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2, err
    assert "and now there is sim 0.1.0, m, revision two" in err
    until(lambda: not _running(on_farm), "what it had asked has left the queue")
    ended = read_results(on_farm.folder / "runs/r/replies.partial.jsonl")
    assert [result.outcome for result in ended] == ["completed"] * 3


def _live(farm: Farm) -> list[str]:
    with redis.Redis.from_url(farm.url) as connection:
        ids = [raw.decode() for raw in connection.smembers(farm.keys.workers)]
        return [id for id in ids if connection.exists(farm.keys.worker(id))]


def _live_revisions(farm: Farm, revisions: list[str]) -> bool:
    with redis.Redis.from_url(farm.url) as connection:
        records = connection.mget([farm.keys.worker(id) for id in _live(farm)])
    return [json.loads(record)["revision"] for record in records if record] == revisions


def _running(cli: Cli) -> int:
    queue = json.loads(cli("status", "--json").stdout)["queues"]["sim"]
    running: int = queue["queued"] + queue["running"]
    return running


@pytest.mark.parametrize(
    "change",
    [
        {"engine": "other"},
        {"version": "2"},
        {"model": "n"},
        {"revision": "b"},
        {"dtype": "float16"},
        {"template_digest": "0123456789abcdef"},
        {"tool_parser": "hermes"},
        {"reasoning_parser": "qwen3"},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_every_field_matters_and_is_said(
    client: Redis, farm: Farm, change: dict[str, Any]
) -> None:
    one = EngineIdentity(engine="e", version="1", model="m")
    await EnginesMet(client, farm.keys, "r").meet([one])
    met = EnginesMet(client, farm.keys, "r")
    await met.read()
    assert met.changed([one]) is None
    other = one.model_copy(update=change)
    (value,) = change.values()
    assert value[:12] in str(met.changed([one, other]))
    await met.meet([other])
    assert met.changed([one, other]) is None
