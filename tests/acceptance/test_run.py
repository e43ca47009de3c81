"""`turnmill run`, whole: conversations in, replies out, whatever is killed on the way."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.acceptance.conftest import Cli
from tests.processes import SimWorker, until

from turnmill.conversations import read_conversations
from turnmill.output import read_results
from turnmill.results import ConversationResult
from turnmill.settings import Farm
from turnmill.turn import Message
from turnmill_worker.engines.sim import history_hash

HISTORY = ("--answer", "history-hash")
Workers = Callable[..., SimWorker]


def replies(cli: Cli, run: str) -> bytes:
    return (cli.folder / "runs" / run / "replies.jsonl").read_bytes()


def partial(cli: Cli, run: str) -> Path:
    return cli.folder / "runs" / run / "replies.partial.jsonl"


def report(cli: Cli, run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((cli.folder / "runs" / run / "report.json").read_text())
    return found


def ended(cli: Cli, run: str) -> int:
    path = partial(cli, run)
    return path.read_bytes().count(b"\n") if path.exists() else 0


def see_that_answers_are_right(results: list[ConversationResult], source: Path) -> None:
    """No message was lost, doubled or mixed: each answer is the digest of all before it."""
    conversations = read_conversations(source).items
    assert [result.id for result in results] == [conversation.id for conversation in conversations]
    for conversation, result in zip(conversations, results, strict=True):
        expected: list[Message] = []
        for user in conversation.turns:
            expected.append(user)
            answer = history_hash(expected)
            expected.append(Message(role="assistant", content=answer))
        assert result.messages == expected


def test_a_run_and_again_from_the_store(alone: Cli) -> None:
    source = alone.conversations(12)
    line = ("run", str(source), "--run", "r", "--engine", "sim", "--json", "--", *HISTORY)
    first = json.loads(alone(*line).stdout)
    assert first["outcomes"] == {"completed": 12, "capped": 0, "failed": 0, "cancelled": 0}
    assert (first["asked"], first["from_store"]) == (36, 0)
    assert first["engines"][0]["engine"] == "sim"
    assert not partial(alone, "r").exists()
    see_that_answers_are_right(read_results(alone.folder / "runs/r/replies.jsonl"), source)

    before = replies(alone, "r")
    again = json.loads(alone(*line).stdout)
    assert (again["asked"], again["from_store"]) == (0, 36)
    assert replies(alone, "r") == before
    text = alone("run", str(source), "--run", "r", "--engine", "sim", "--", *HISTORY).stdout
    assert "Everything was answered from the store" in text


@pytest.mark.faults
def test_a_producer_that_is_killed_goes_on_and_asks_nothing_twice(
    on_farm: Cli, worker: Workers
) -> None:
    worker("--served-name", "sim", "--slots", "8", sim=(*HISTORY, "--latency", "0.02"))
    # Draws, not greedy turns: their sample numbers must come out the same again.
    source = on_farm.write([{"id": f"c{i}", "turns": [f"{i}", "on", "on"]} for i in range(60)])
    on_farm("run", str(source), "--run", "whole", "--model", "sim")
    undisturbed = read_results(on_farm.folder / "runs/whole/replies.jsonl")

    for kill_at in (1, 15, 30, 45):
        process = on_farm.start("run", str(source), "--run", "r", "--model", "sim")
        until(lambda at=kill_at: ended(on_farm, "r") >= at, "conversations have ended")
        process.kill()
        process.wait()
        whole_lines = partial(on_farm, "r").read_text().splitlines()
        assert len([json.loads(line) for line in whole_lines]) >= kill_at
    last = json.loads(on_farm("run", str(source), "--run", "r", "--model", "sim", "--json").stdout)
    assert last["from_store"] >= 3 * 45
    assert last["from_store"] + last["asked"] == 180
    results = read_results(on_farm.folder / "runs/r/replies.jsonl")
    see_that_answers_are_right(results, source)
    assert [r.messages for r in results] == [r.messages for r in undisturbed]
    # Draws of two runs are two draws.
    assert {t.hash for r in results for t in r.turns}.isdisjoint(
        {t.hash for r in undisturbed for t in r.turns}
    )
    # What killed attempts left in the engine was found again: nothing was answered twice.
    status = json.loads(on_farm("status", "--json").stdout)
    counters = {run["name"]: run for run in status["runs"]}
    assert counters["r"]["total"] == counters["r"]["done"] == 180
    assert status["queues"]["sim"]["running"] == status["queues"]["sim"]["queued"] == 0


@pytest.mark.faults
def test_replies_are_byte_for_byte_those_of_an_undisturbed_run(
    on_farm: Cli, worker: Workers, make_cli: Callable[..., Cli], farm: Farm
) -> None:
    worker("--served-name", "sim", "--slots", "8", sim=(*HISTORY, "--latency", "0.02"))
    source = on_farm.write([{"id": f"c{i}", "turns": [f"{i}", "on", "on"]} for i in range(40)])
    for kill_at in (1, 10, 20):
        process = on_farm.start("run", str(source), "--run", "r", "--model", "sim")
        until(lambda at=kill_at: ended(on_farm, "r") >= at, "conversations have ended")
        process.kill()
        process.wait()
    on_farm("run", str(source), "--run", "r", "--model", "sim")
    disturbed = replies(on_farm, "r")

    other = Farm(farm.url, f"{farm.namespace}-other")
    worker("--served-name", "sim", sim=HISTORY, farm=other)
    again = make_cli(other)
    again("run", str(source), "--run", "r", "--model", "sim", "--out", str(again.folder / "other"))
    assert (again.folder / "other/replies.jsonl").read_bytes() == disturbed


@pytest.mark.faults
def test_a_killed_worker_is_started_again_by_its_run(alone: Cli) -> None:
    source = alone.conversations(40)
    process = alone.start(
        *("run", str(source), "--run", "r", "--engine", "sim", "--slots", "4", "--json"),
        *("--", *HISTORY, "--latency", "0.05"),
    )
    until(lambda: ended(alone, "r") >= 1, "conversations have ended")
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid), "-f", "turnmill_worker"], capture_output=True, text=True
    ).stdout.split()
    assert len(children) == 1
    subprocess.run(["kill", "-KILL", *children], check=True)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "the worker ended (signal 9)" in err
    assert json.loads(out)["outcomes"]["completed"] == 40
    see_that_answers_are_right(read_results(alone.folder / "runs/r/replies.jsonl"), source)


@pytest.mark.faults
def test_a_run_goes_on_with_another_worker(on_farm: Cli, worker: Workers) -> None:
    first = worker("--served-name", "sim", "--slots", "4", sim=(*HISTORY, "--latency", "0.1"))
    source = on_farm.conversations(20)
    process = on_farm.start("run", str(source), "--run", "r", "--model", "sim")
    until(lambda: ended(on_farm, "r") >= 1, "conversations have ended")
    first.kill()
    worker("--served-name", "sim", sim=HISTORY)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    see_that_answers_are_right(read_results(on_farm.folder / "runs/r/replies.jsonl"), source)


@pytest.mark.faults
def test_nothing_outlives_a_run_that_is_killed(alone: Cli) -> None:
    source = alone.conversations(5)
    process = alone.start(
        *("run", str(source), "--run", "r", "--engine", "sim", "--", "--latency", "100")
    )

    def children() -> list[str]:
        found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
        return found.stdout.split()

    until(lambda: len(children()) == 2, "a server and a worker have been started")
    pids = children()
    process.kill()
    process.wait()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "they have ended")


def test_without_a_worker_it_says_so_and_waits(on_farm: Cli, worker: Workers) -> None:
    source = on_farm.conversations(3)
    process = on_farm.start("run", str(source), "--run", "r", "--model", "sim")
    assert process.stderr is not None
    assert "no live worker serves sim; waiting for one" in process.stderr.readline()
    worker("--served-name", "sim")
    assert process.wait(30) == 0


def test_without_a_model_it_takes_the_workers(on_farm: Cli, worker: Workers) -> None:
    source = on_farm.conversations(3)
    process = on_farm.start("run", str(source), "--run", "r")
    assert process.stderr is not None
    assert "waiting for a worker to say what it serves" in process.stderr.readline()
    worker("--served-name", "the-only-one")
    assert process.wait(30) == 0
    worker("--served-name", "another")
    refused = on_farm("run", str(source), "--run", "r", exits=2).stderr
    assert "workers serve another, the-only-one: choose one with --model" in refused


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_it_says_how_to_go_on(alone: Cli, number: signal.Signals, code: int) -> None:
    source = alone.conversations(30)
    line = ("run", str(source), "--run", "r", "--engine", "sim", "--slots", "2", "--json", "--")
    process = alone.start(*line, *HISTORY, "--latency", "0.1")
    until(lambda: ended(alone, "r") >= 1, "conversations have ended")
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert "The same command goes on" in err
    assert out == ""
    last = json.loads(alone(*line, *HISTORY).stdout)
    assert last["from_store"] >= 3
    assert last["outcomes"]["completed"] == 30


def test_a_spent_budget_stops_the_run(on_farm: Cli, worker: Workers) -> None:
    worker("--served-name", "sim", sim=("--reject-if", "bad"))
    lines: list[object] = [
        {"id": f"c{i}", "turns": ["bad" if i % 2 else "good"]} for i in range(200)
    ]
    source = on_farm.write(lines)
    line = ("run", str(source), "--run", "r", "--model", "sim", "--concurrency", "4")
    stopped = on_farm(*line, "--json", exits=1)
    assert "over the budget of 5%; nothing more is enqueued" in stopped.stderr
    seen = json.loads(stopped.stdout)
    assert 20 <= sum(seen["outcomes"].values()) < 60
    assert seen["failures"]["invalid_request"] == seen["outcomes"]["failed"]
    assert partial(on_farm, "r").exists()
    assert not (on_farm.folder / "runs/r/replies.jsonl").exists()

    # What failed before does not stop the next attempt, but the run is over its budget all the same.
    more = on_farm(*line, "--max-failures", "100", "--json")
    whole = json.loads(more.stdout)
    assert whole["outcomes"] == {"completed": 100, "capped": 0, "failed": 100, "cancelled": 0}
    assert "100 conversations failed" in more.stderr
    assert json.loads(on_farm(*line, "--json", exits=1).stdout)["from_store"] == 200
    failed = read_results(on_farm.folder / "runs/r/replies.jsonl")[1]
    assert failed.outcome == "failed"
    assert failed.error is not None
    assert failed.turns[0].failure is not None


def test_caps_are_told_apart(alone: Cli) -> None:
    source = alone.write(
        [
            {"id": "output", "turns": ["a b c d e f", "on"], "sampling": {"max_tokens": 2}},
            {"id": "context", "turns": ["fine", "word " * 200, "never asked"]},
            {"id": "neither", "turns": ["a", "b"]},
        ]
    )
    line = ("run", str(source), "--run", "r", "--engine", "sim", "--", "--context", "100")
    text = alone(*line).stdout
    assert "turns capped by output" in text
    by_id = {r.id: r for r in read_results(alone.folder / "runs/r/replies.jsonl")}
    assert (by_id["output"].outcome, by_id["output"].capped) == ("completed", "output")
    assert (by_id["context"].outcome, by_id["context"].capped) == ("capped", "context")
    assert len(by_id["context"].turns) == 2
    assert (by_id["neither"].outcome, by_id["neither"].capped) == ("completed", None)
    assert report(alone, "r")["capped"] == {"output": 1, "context": 1, "turns": 0, "time": 0}


def test_a_bad_file_is_refused_whole(on_farm: Cli, farm: Farm) -> None:
    path = on_farm.folder / "in.jsonl"
    good = '{"id": "a", "turns": ["hello"]}\n'
    path.write_text(good + "{not json\n" + good + '{"id": "b", "turn": []}\n')
    refused = on_farm("run", str(path), "--run", "r", "--model", "sim", exits=2).stderr
    assert f"{path}:2: not JSON" in refused
    assert f"{path}:3: id 'a' is taken by line 1" in refused
    assert f"{path}:4:" in refused
    assert not (on_farm.folder / "runs").exists()
    with redis.Redis.from_url(farm.url) as connection:
        assert list(connection.scan_iter(f"{farm.namespace}:*")) == []


def test_bad_lines_can_be_left_out(on_farm: Cli, worker: Workers) -> None:
    worker("--served-name", "sim")
    path = on_farm.folder / "in.jsonl"
    path.write_text('{"id": "a", "turns": ["hello"]}\n{not json\n')
    done = on_farm("run", str(path), "--run", "r", "--model", "sim", "--skip-bad", "--json")
    assert f"left out: {path}:2: not JSON" in done.stderr
    assert json.loads(done.stdout)["outcomes"]["completed"] == 1


def test_mt_benchs_own_lines(on_farm: Cli, worker: Workers) -> None:
    worker("--served-name", "sim")
    line = {"question_id": 81, "category": "writing", "turns": ["Write.", "Write it again."]}
    source = on_farm.write([line])
    on_farm("run", str(source), "--run", "r", "--model", "sim")
    (result,) = read_results(on_farm.folder / "runs/r/replies.jsonl")
    assert result.id == "81"
    assert [m.role for m in result.messages] == ["user", "assistant"] * 2


def test_multi_ifs_table_with_a_runaway_and_a_turn_that_cannot_begin(
    on_farm: Cli, worker: Workers
) -> None:
    """Neither fails the run, nor another conversation; both end as capped, with what they have."""
    worker("--served-name", "sim", sim=("--context", "100"))
    texts = {f"{i}:1:en": [f"number {i}", "on", "and on"] for i in range(3)}
    texts["runaway"] = ["word " * 60, "never asked", "nor this"]
    texts["late"] = ["fine", "word " * 200, "never asked"]
    header = ["turn_1_prompt", "turn_2_prompt", "turn_3_prompt", "key", "language"]
    with open(on_farm.folder / "multi_if.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(header)
        for key, turns in texts.items():
            prompts = [json.dumps({"role": "user", "content": text}) for text in turns]
            rows.writerow([*prompts, key, "English"])
    line = ("run", "multi_if.csv", "--run", "r", "--model", "sim", "--max-failures", "0", "--json")
    seen = json.loads(on_farm(*line).stdout)
    assert seen["outcomes"] == {"completed": 3, "capped": 2, "failed": 0, "cancelled": 0}
    assert seen["capped"]["context"] == 2
    by_id = {r.id: r for r in read_results(on_farm.folder / "runs/r/replies.jsonl")}
    assert list(by_id) == list(texts)
    (turn,) = by_id["runaway"].turns
    assert turn.usage is not None
    assert turn.usage.completion_tokens > 0
    assert [m.role for m in by_id["late"].messages] == ["user", "assistant"] * 2
    assert [t.capped for t in by_id["late"].turns] == [None, "context"]
    assert len(by_id["0:1:en"].turns) == 3


def test_a_changed_run_is_refused_by_what_changed(on_farm: Cli, worker: Workers) -> None:
    worker("--served-name", "sim")
    source = on_farm.conversations(3)
    line = ("run", str(source), "--run", "r", "--model", "sim")
    on_farm(*line)
    refused = on_farm(*line, "--seed", "1", "--top-p", "0.5", exits=2).stderr
    assert "run 'r' was begun with other sampling, seed" in refused
    on_farm.conversations(4)
    assert "was begun with other conversations" in on_farm(*line, exits=2).stderr
    extended = json.loads(on_farm(*line, "--extend", "--json").stdout)
    assert (extended["from_store"], extended["asked"]) == (9, 3)


def test_a_second_producer_is_refused_by_name(
    on_farm: Cli, make_cli: Callable[..., Cli], farm: Farm
) -> None:
    source = on_farm.conversations(3)
    first = on_farm.start("run", str(source), "--run", "r", "--model", "sim")
    assert first.stderr is not None
    first.stderr.readline()  # it waits for a worker
    refused = on_farm(
        *("run", str(source), "--run", "r", "--model", "sim", "--out", str(on_farm.folder / "x")),
        exits=2,
    )
    assert f"run 'r' has a producer: process {first.pid} on " in refused.stderr
    folder = on_farm("run", str(source), "--run", "r", "--model", "sim", exits=2)
    assert "is being written by another run" in folder.stderr


def test_greedy_and_seeded_turns_are_shared_and_draws_are_not(
    on_farm: Cli, worker: Workers
) -> None:
    worker("--served-name", "sim")
    source = on_farm.write([{"id": "a", "turns": ["hello"]}])

    def asked(run: str, *options: str) -> int:
        line = ("run", str(source), "--run", run, "--model", "sim", "--json", *options)
        return int(json.loads(on_farm(*line).stdout)["asked"])

    assert [asked("draw-1"), asked("draw-2"), asked("draw-1")] == [1, 1, 0]
    assert [asked("greedy-1", "--temperature", "0"), asked("greedy-2", "--temperature", "0")] == [
        1,
        0,
    ]
    assert [asked("seeded", "--seed", "1"), asked("seeded", "--seed", "1")] == [1, 0]


def test_replies_can_be_read_at_any_time(on_farm: Cli, worker: Workers) -> None:
    assert "there are no replies in it" in on_farm("replies", "r", exits=2).stderr
    worker("--served-name", "sim", "--slots", "1", sim=("--latency", "0.2"))
    source = on_farm.conversations(8)
    process = on_farm.start("run", str(source), "--run", "r", "--model", "sim")
    until(lambda: ended(on_farm, "r") >= 2, "conversations have ended")
    during = [json.loads(line) for line in on_farm("replies", "r").stdout.splitlines()]
    assert 2 <= len(during) < 8
    assert process.wait(30) == 0
    after = on_farm("replies", "r").stdout
    assert after.encode() == replies(on_farm, "r")


def test_who_reads_the_replies_may_stop_reading(alone: Cli) -> None:
    source = alone.conversations(50)
    alone("run", str(source), "--run", "r", "--engine", "sim", "--", "--answer-tokens", "2000")
    line = f"{sys.executable} -m turnmill replies r | head -c 10"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}"], cwd=alone.folder, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (141, "")


def test_standard_input_can_be_interrupted(on_farm: Cli) -> None:
    process = on_farm.start("run", "-", "--run", "r", "--model", "sim", stdin=subprocess.PIPE)
    until(lambda: _sleeps_in_read(process.pid), "it reads")
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130


def _sleeps_in_read(pid: int) -> bool:
    return "pipe_read" in Path(f"/proc/{pid}/wchan").read_text()


def test_a_worker_that_cannot_start_ends_the_run_with_its_own_words(alone: Cli) -> None:
    source = alone.conversations(1)
    refused = alone(
        "run", str(source), "--run", "r", "--engine", "sim", "--", "--nonsense", exits=2
    )
    assert "turnmill: engine sim: unrecognized arguments: --nonsense" in refused.stderr
    refused = alone("run", str(source), "--run", "r", "--engine", "warp", exits=2)
    assert "'warp' is not one of" in refused.stderr


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--run", "a/b"], "run 'a/b'"),
        (["--run", "r", "--concurrency", "many"], "concurrency 'many'"),
        (["--run", "r", "--max-failures", "200%"], "max-failures '200%'"),
        (["--run", "r", "--temperature", "-1"], "sampling.temperature: "),
        (["--run", "r", "--engine", "sim"], "REDIS_URL is set"),
        (["--run", "adhoc"], "run 'adhoc': names of this form are for turns outside a run"),
        (["--run", "r", "--model", "\udcff"], "model '\\udcff': not UTF-8"),
        (["--run", "r", "--model", "m", "--stop", "\udcff"], "stop '\\udcff': not UTF-8"),
    ],
)
def test_wrong_options_are_one_line(on_farm: Cli, options: list[str], what: str) -> None:
    refused = on_farm("run", str(on_farm.conversations(1)), *options, exits=2).stderr
    assert what in refused
    assert len(refused.strip().splitlines()) == 1


def test_names_are_shown_as_they_are(on_farm: Cli, worker: Workers) -> None:
    model = "base:a:[/b]"
    worker("--served-name", model)
    source = on_farm.conversations(1)
    done = on_farm("run", str(source), "--run", "r", "--model", model, "--out", "[/b]")
    assert "[/b]/replies.jsonl, [/b]/report.json" in done.stdout
    assert model in on_farm("status", COLUMNS="200").stdout
    on_farm.write([{"id": "x:b:y", "turns": ["[/b]"]}] * 2, "bad.jsonl")
    assert "id 'x:b:y' is taken" in on_farm("run", "bad.jsonl", "--run", "s", exits=2).stderr


def test_a_wrong_password_is_permanent(
    make_cli: Callable[..., Cli], own_valkey: Callable[..., Any]
) -> None:
    server = own_valkey(requirepass="secret")
    cli = make_cli(Farm(server.url))
    source = cli.conversations(1)
    refused = cli("run", str(source), "--run", "r", "--model", "sim", exits=3).stderr
    assert "Redis refuses" in refused
    assert "uthentication" in refused
