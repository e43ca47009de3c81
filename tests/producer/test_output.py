"""A run's files: whole lines, whole files, never less than there was, whenever it is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from turnmill.errors import BadInput, CannotWrite, RecordError, RunInUse, UsageError
from turnmill.output import RunFiles, read_results
from turnmill.reply import EngineIdentity, Failure, Usage
from turnmill.results import Caps, ConversationResult, Outcomes, Report, Tokens, TurnResult
from turnmill.turn import Message

REPORT = Report(run="demo", seconds=1.5)
HASH = "ab" * 32


def result(identifier: str, text: str = "grüß dich", **fields: Any) -> ConversationResult:
    return ConversationResult(
        id=identifier,
        outcome=fields.pop("outcome", "completed"),
        messages=[Message(role="user", content="hi"), Message(role="assistant", content=text)],
        **fields,
    )


def raw(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "demo"


def test_a_line_has_all_its_keys_in_order_and_its_text_as_it_is(folder: Path) -> None:
    with RunFiles(folder, "demo") as files:
        turn = TurnResult(
            hash=HASH,
            sample=3,
            finish_reason="length",
            capped="output",
            usage=Usage(prompt_tokens=5, completion_tokens=2),
        )
        lost = TurnResult(hash=HASH, failure=Failure(hash=HASH, kind="poison", text="t", tries=3))
        files.append(result("a", turns=[turn, lost], error="first\n  second"))
    (line,) = raw(folder / "replies.partial.jsonl")
    assert (
        line.decode() == '{"id":"a","epoch":0,"outcome":"completed","capped":null,"messages":['
        '{"role":"user","content":"hi"},{"role":"assistant","content":"grüß dich"}],"turns":['
        f'{{"hash":"{HASH}","sample":3,"finish_reason":"length","capped":"output","usage":'
        '{"prompt_tokens":5,"completion_tokens":2,"cached_tokens":0,"reasoning_tokens":0},'
        '"failure":null},'
        f'{{"hash":"{HASH}","sample":0,"finish_reason":null,"capped":null,"usage":null,"failure":'
        f'{{"hash":"{HASH}","kind":"poison","text":"t","tries":3}}}}],"error":"first second",'
        '"ending":null,"score":null,"details":null}\n'
    )


def test_the_keys_of_tool_calls_are_kept_null_included(folder: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}, "x": None}
    message = Message(role="assistant", tool_calls=[call])
    written = ConversationResult(id="a", outcome="completed", messages=[message])
    with RunFiles(folder, "demo") as files:
        files.append(written)
    (line,) = raw(folder / "replies.partial.jsonl")
    assert json.loads(line)["messages"] == [{"role": "assistant", "tool_calls": [call]}]
    assert read_results(folder / "replies.partial.jsonl") == [written]


def test_the_partial_file_grows_and_is_replaced_in_input_order(folder: Path) -> None:
    results = [result("a"), result("b"), result("b", epoch=1)]
    with RunFiles(folder, "demo") as files:
        for number, one in enumerate(reversed(results), start=1):
            files.append(one)
            assert len(read_results(folder / "replies.partial.jsonl")) == number
        files.finish(results, REPORT)
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock",
        "replies.jsonl",
        "report.json",
    ]
    assert read_results(folder / "replies.jsonl") == results
    assert Report.model_validate_json((folder / "report.json").read_bytes()) == REPORT


def test_the_same_results_give_the_same_bytes(folder: Path) -> None:
    results = [result("a"), result("b")]
    written = []
    for order in (results, results[::-1]):
        with RunFiles(folder, "demo") as files:
            for one in order:
                files.append(one)
            files.finish(results, REPORT)
        written.append((folder / "replies.jsonl").read_bytes())
    assert written[0] == written[1]


def test_a_resumed_run_goes_on_in_the_partial_file(folder: Path) -> None:
    partial = folder / "replies.partial.jsonl"
    with RunFiles(folder, "demo") as files:
        files.append(result("a"))
        files.append(result("b", outcome="failed"))
    before = raw(partial)
    with RunFiles(folder, "demo") as files:
        assert raw(partial) == before, "nothing is less than it was"
        files.append(result("a"))
        assert raw(partial) == before, "the same result is not written again"
        files.append(result("b"))
        assert [(one.id, one.outcome) for one in read_results(partial)] == [
            ("a", "completed"),
            ("b", "completed"),
        ]
    with RunFiles(folder, "demo"):
        assert len(raw(partial)) == 2, "of two lines of one conversation the later is kept"


def test_a_finished_run_keeps_its_files_until_the_next_end(folder: Path) -> None:
    with RunFiles(folder, "demo") as files:
        files.finish([result("a")], REPORT)
    with RunFiles(folder, "demo") as files:
        assert read_results(folder / "replies.jsonl") == [result("a")]
        files.append(result("a"))
        assert read_results(folder / "replies.jsonl") == [result("a")]


@pytest.mark.parametrize("tail", [b'{"id":"half","epo', b"\0\0\0\n", b'{"id":"x"}\n'])
def test_what_is_no_line_is_cut_off_on_opening(folder: Path, tail: bytes) -> None:
    partial = folder / "replies.partial.jsonl"
    with RunFiles(folder, "demo") as files:
        files.append(result("a"))
    with open(partial, "ab") as file:
        file.write(tail)
    with RunFiles(folder, "demo") as files:
        files.append(result("b"))
    assert [one.id for one in read_results(partial)] == ["a", "b"]
    assert len(raw(partial)) == 2


def test_a_half_last_line_is_not_read_and_another_bad_line_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "replies.partial.jsonl"
    line = result("a").model_dump_json()
    file.write_text(f"{line}\n{line[:-5]}")
    assert read_results(file) == [result("a")]
    file.write_text(f"{line}\n{{}}\n{line}")
    with pytest.raises(RecordError, match=r"replies\.partial\.jsonl:2: id: Field required"):
        read_results(file)
    with pytest.raises(BadInput, match="cannot be read: No such file"):
        read_results(tmp_path / "none")


def test_two_processes_cannot_write_in_one_folder(folder: Path) -> None:
    with RunFiles(folder, "demo"), pytest.raises(RunInUse, match="by another run"):
        RunFiles(folder, "demo").__enter__()
    with RunFiles(folder, "demo"):
        pass


def test_another_runs_files_are_not_overwritten(folder: Path) -> None:
    with RunFiles(folder, "demo") as files:
        files.finish([result("a")], REPORT)
    with pytest.raises(UsageError, match="holds the files of run 'demo'"):
        RunFiles(folder, "other").__enter__()
    for name in ("replies.jsonl", "report.json"):
        (folder / name).unlink()
    with RunFiles(folder, "other"):
        pass


WRITER = """
import sys
from pathlib import Path
from turnmill.output import RunFiles
from turnmill.results import ConversationResult
from turnmill.turn import Message

with RunFiles(Path(sys.argv[1]), "demo") as files:
    for number in range(10**9):
        message = Message(role="assistant", content="x" * (number * 7919 % 20_000))
        files.append(ConversationResult(id=str(number), outcome="completed", messages=[message]))
        if number == 20:
            print("twenty", flush=True)
"""


@pytest.mark.faults
def test_a_killed_writer_leaves_no_half_lines(folder: Path) -> None:
    partial = folder / "replies.partial.jsonl"
    kept = 0
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"twenty\n"
            read_results(partial)  # also while it is being written
            writer.kill()
        ids = [int(one.id) for one in read_results(partial)]
        assert ids == list(range(len(ids)))
        assert len(ids) >= max(kept, 20)
        kept = len(ids)
    with RunFiles(folder, "demo") as files:
        files.append(result("last"))
    lines = raw(partial)
    assert len(lines) == kept + 1
    assert all(json.loads(line) for line in lines)


FULL = """
import resource, sys
from pathlib import Path
from turnmill.errors import CannotWrite
from turnmill.output import RunFiles
from turnmill.results import ConversationResult, Report

resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
with RunFiles(Path(sys.argv[1]), "demo") as files:
    results = [ConversationResult(id=f"{n:0300}", outcome="failed", messages=[]) for n in range(5)]
    try:
        for result in results:
            files.append(result)
    except CannotWrite as error:
        print(error)
    try:
        files.finish(results, Report(run="demo", seconds=1))
    except CannotWrite as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    files.append(results[-1])
"""


def test_a_disk_that_takes_half_a_line_is_one_line_and_loses_none(folder: Path) -> None:
    """A limit on the size of files cuts a write short, as a full disk does."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(folder)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        f"cannot write {folder}/replies.partial.jsonl: File too large",
        f"cannot write {folder}/replies.jsonl: File too large",
    ]
    lines = raw(folder / "replies.partial.jsonl")
    assert [int(json.loads(line)["id"]) for line in lines] == [0, 1, 4]
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "replies.partial.jsonl"]


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite) as caught:
        RunFiles(tmp_path / "file" / "demo", "demo").__enter__()
    assert str(caught.value) == f"cannot write {tmp_path}/file/demo: Not a directory"


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CannotWrite, match="Permission denied"):
        RunFiles(tmp_path, "demo").__enter__()


def test_a_report_counts() -> None:
    usage = Usage(prompt_tokens=10, completion_tokens=4, cached_tokens=6)
    short = TurnResult(hash=HASH, finish_reason="length", capped="output", usage=usage)
    full = TurnResult(hash=HASH, finish_reason="length", capped="context", usage=usage)
    dead = TurnResult(hash=HASH, failure=Failure(hash=HASH, kind="poison", text="t"))
    engine = EngineIdentity(engine="sim", version="1", model="m")
    report = Report.of(
        [
            result("a", turns=[short, short], capped="output"),
            result("b", turns=[short, full], outcome="capped", capped="context"),
            result("c", turns=[dead], outcome="failed"),
            result("d", outcome="failed", error="the scaffold fell"),
            result("e", outcome="cancelled"),
        ],
        run="demo",
        seconds=2.0,
        engines=[engine],
        from_store=3,
        asked=2,
    )
    assert report == Report(
        run="demo",
        outcomes=Outcomes(completed=1, capped=1, failed=2, cancelled=1),
        capped=Caps(output=3, context=1),
        failures={"poison": 1, "scaffold": 1},
        tokens=Tokens(prompt=40, completion=16, cached=24),
        seconds=2.0,
        engines=[engine],
        from_store=3,
        asked=2,
    )
    assert list(json.loads(report.model_dump_json())) == [
        "run",
        "outcomes",
        "capped",
        "failures",
        "endings",
        "scores",
        "tokens",
        "seconds",
        "engines",
        "from_store",
        "asked",
    ]
