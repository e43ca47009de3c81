"""The parts of vanillux: its tasks, what it makes of answers and of output, its options."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from turnmill import Message
from turnmill.errors import BadInput, BadLines, UsageError
from turnmill.scaffolds.finding import find, names
from turnmill.scaffolds.vanillux import packing
from turnmill.scaffolds.vanillux.calls import understand
from turnmill.scaffolds.vanillux.observation import Observation
from turnmill.scaffolds.vanillux.packing import pack
from turnmill.scaffolds.vanillux.prompts import DONE, is_submission, observed, opening
from turnmill.scaffolds.vanillux.task import read_tasks

EXAMPLES = Path(__file__).parents[2] / "examples" / "terminal-tasks.jsonl"

# Tasks


def test_the_examples_are_tasks() -> None:
    tasks = read_tasks(str(EXAMPLES)).items
    assert [task.id for task in tasks] == ["backup-script", "primes", "access-log"]
    assert len({task.digest for task in tasks}) == 3


def a_folder(path: Path, text: str, name: str = "task.toml") -> Path:
    path.mkdir(parents=True)
    (path / name).write_text(text)
    return path


def test_tasks_in_folders(tmp_path: Path) -> None:
    one = a_folder(tmp_path / "one", 'prompt = "Do"\ncheck = "test -e done"\n')
    (one / "files" / "deep").mkdir(parents=True)
    (one / "files" / "deep" / "x").write_text("7")
    a_folder(tmp_path / "two", '{"prompt": "Do", "check_files": {"a": "b"}}', "task.json")
    (tmp_path / "no task").mkdir()
    first, second = read_tasks(str(tmp_path)).items
    assert (first.id, first.check, first.files) == ("one", "test -e done", one / "files")
    assert (second.id, second.check, second.check_files) == ("two", None, {"a": "b"})
    assert read_tasks(str(one)).items == [first]
    os.utime(one / "files" / "deep" / "x", (1, 1))
    assert read_tasks(str(one)).items[0].digest == first.digest
    (one / "files" / "deep" / "x").write_text("8")
    assert read_tasks(str(one)).items[0].digest != first.digest


def test_folders_of_a_line_are_beside_its_file(tmp_path: Path) -> None:
    (tmp_path / "stuff").mkdir()
    (tmp_path / "stuff" / "x").write_text("7")
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"id": 3, "prompt": "Do", "files": "stuff"}\n')
    (task,) = read_tasks(str(file)).items
    assert (task.id, task.files) == ("3", tmp_path / "stuff")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"id": "a"}, "prompt: is missing"),
        (
            {"id": "a", "promt": "x"},
            "prompt: is missing; promt: unknown key, did you mean prompt?",
        ),
        (
            {"id": "a", "prompt": "x", "files": {"f": 3}},
            "files: must be texts by their names, or the name of a folder",
        ),
        ({"id": "a", "prompt": ""}, "prompt: .*at least 1 character"),
        ({"id": True, "prompt": "x"}, "id: "),
        ({"id": "a", "prompt": "x", "cheque": "y"}, "cheque: unknown key"),
        ({"id": "a", "prompt": "x", "digest": "y"}, "digest: unknown key"),
        ({"id": "a", "prompt": "x", "files": "nowhere"}, "files: .*nowhere is no folder"),
        ({"id": "a", "prompt": "x", "files": {"../y": ""}}, "files: '../y' is no name of a file"),
        ({"id": "a", "prompt": "x", "files": {"/y": ""}}, "files: '/y' is no name of a file"),
        ({"id": "a", "prompt": "x", "check_files": {"": ""}}, "check_files: '' is no name"),
        ({"id": "a", "prompt": "x", "check_seconds": 0}, "check_seconds: .*greater than 0"),
    ],
)
def test_what_is_no_task(tmp_path: Path, line: dict[str, Any], says: str) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps(line))
    with pytest.raises(BadLines, match=says):
        read_tasks(str(file))


def test_folders_that_are_no_tasks(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no folder in it has a task\.toml or a task\.json"):
        read_tasks(str(tmp_path))
    a_folder(tmp_path / "a", "prompt = ")
    a_folder(tmp_path / "b", "[]", "task.json")
    a_folder(tmp_path / "c", 'prompt = "x"')
    with pytest.raises(
        BadLines, match=r"(?s)a/task\.toml: not TOML: Invalid.*b/task\.json: must be a JSON"
    ):
        read_tasks(str(tmp_path))
    loaded = read_tasks(str(tmp_path), skip_bad=True)
    assert [task.id for task in loaded.items] == ["c"]
    assert len(loaded.bad) == 2


def test_images_are_for_docker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"id": "a", "prompt": "Do", "image": "python:3.12"}\n')
    scaffold = find("vanillux", {"sandbox": "local", "unsafe_local": "true"})
    assert scaffold.read(str(file), False).items[0].image == "python:3.12"
    assert "images (python:3.12), which only Docker has: in local" in caplog.text


# Files


def unpacked(packed: bytes) -> dict[str, int]:
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        return {entry.name: entry.mode for entry in tar}


def test_files_are_packed_alike_on_all_machines(tmp_path: Path) -> None:
    for name, mode in (("b", 0o600), ("a", 0o700)):
        (tmp_path / name).write_text(name)
        (tmp_path / name).chmod(mode)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("a")
    os.link(tmp_path / "a", tmp_path / "same")
    packed = pack(tmp_path)
    assert packed == pack(tmp_path)
    modes = unpacked(packed)
    assert list(modes) == ["a", "b", "empty", "link", "same"]
    assert (modes["a"], modes["b"], modes["same"]) == (0o755, 0o644, 0o755)
    assert unpacked(pack({"x/y": "#!/bin/sh\n", "z": ""})) == {"x/y": 0o755, "z": 0o644}


def test_too_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MOST", 1 << 20)
    with open(tmp_path / "big", "wb") as file:
        file.truncate(2 << 20)
    with pytest.raises(ValueError, match="more than 1 MiB"):
        pack(tmp_path)
    with pytest.raises(ValueError, match="more than 1 MiB"):
        pack({"big": "x" * (2 << 20)})


# Answers


def asked(*functions: dict[str, Any], **keys: Any) -> Message:
    calls = [{"id": f"c{i}", "type": "function", "function": f} for i, f in enumerate(functions)]
    return Message(role="assistant", content=None, tool_calls=calls, **keys)


def bash(arguments: Any) -> dict[str, Any]:
    return {"name": "bash", "arguments": arguments}


def test_good_calls_are_told_again_as_they_were() -> None:
    message = asked(bash('{"command":"ls"}'), bash('{"command": "pwd", "timeout": 3}'))
    told, calls = understand(message)
    assert told == message
    assert [(call.id, call.command, call.wrong) for call in calls] == [
        ("c0", "ls", None),
        ("c1", "pwd", None),
    ]
    plain = Message(role="assistant", content="Hm.")
    assert understand(plain) == (plain, [])


@pytest.mark.parametrize(
    ("function", "says", "told"),
    [
        (bash('{"command": "ls'), "not a JSON object", {"malformed": '{"command": "ls'}),
        (bash('["ls"]'), "not a JSON object", {"malformed": '["ls"]'}),
        (bash('{"command": NaN}'), "not a JSON object", {"malformed": '{"command": NaN}'}),
        (bash("[" * 100_000), "not a JSON object", {"malformed": "[" * 100_000}),
        (bash(None), "not a JSON object", {"malformed": "None"}),
        (bash("{}"), 'no text "command"', {}),
        (bash('{"command": " "}'), 'no text "command"', {"command": " "}),
        (bash('{"command": ["ls"]}'), 'no text "command"', {"command": ["ls"]}),
        (bash('{"command": "a\\u0000b"}'), "no command can have", {"command": "a\0b"}),
        (bash('{"command": "\\ud800"}'), "no command can have", {"command": "\ud800"}),
        ({"name": "python", "arguments": "{}"}, "no tool 'python'", {}),
        ({}, "no tool None", {"malformed": "None"}),
    ],
)
def test_bad_calls(function: dict[str, Any], says: str, told: dict[str, Any]) -> None:
    message, (call,) = understand(asked(function))
    assert call.wrong is not None
    assert says in call.wrong
    assert message.tool_calls is not None
    # Whatever the model wrote, a chat template finds an object.
    assert json.loads(message.tool_calls[0]["function"]["arguments"]) == told


def test_line_breaks_inside_of_strings_are_understood() -> None:
    message, (call,) = understand(asked(bash('{"command": "a\nb"}')))
    assert (call.command, call.wrong) == ("a\nb", None)
    assert message.tool_calls is not None
    assert json.loads(message.tool_calls[0]["function"]["arguments"]) == {"command": "a\nb"}


def test_every_call_has_an_id_of_its_own() -> None:
    raw = [
        {"id": id, "function": bash('{"command": "ls"}')} for id in ("call_1", "call_1", "", None)
    ]
    message, calls = understand(Message(role="assistant", content=None, tool_calls=raw))
    ids = [call.id for call in calls]
    assert len(set(ids)) == 4
    assert ids == [told["id"] for told in message.tool_calls or ()]


# What it is told


@pytest.mark.parametrize("size", [1, 3, 1000, 10_000])
def test_output_in_pieces_is_output(size: int) -> None:
    data = "aé€😀\n".encode() * 700
    whole, small = Observation(10_000), Observation(100)
    for start in range(0, len(data), size):
        for seen in (whole, small):
            seen.feed(data[start : start + size])
    text = data.decode()
    assert whole.text == text
    assert (
        small.text == f"{text[:50]}\n[... {len(text) - 100} characters left out ...]\n{text[-50:]}"
    )


def ran(output: str = "", exit: int = 0, killed: Any = None) -> Any:
    return {"exit": exit, "output": output, "killed": killed}


def test_observations() -> None:
    assert observed(ran("a"), 9) == "a\n[exit code 0]"
    assert observed(ran("a\n", 3), 9) == "a\n[exit code 3]"
    assert observed(ran(), 9) == "[exit code 0, no output]"
    assert observed(ran("a", 137, "time"), 9).startswith("a\n[killed after 9 seconds")
    assert "printed too much" in observed(ran("a", 137, "output"), 9)


def test_what_submits() -> None:
    assert is_submission(ran(f"all passed\n{DONE}\n\n"))
    for other in (
        ran(f"{DONE}\nmore"),
        ran(f"echo {DONE}"),
        ran(DONE, 1),
        ran(DONE, 137, "time"),
        ran(),
    ):
        assert not is_submission(other)


def test_a_prompt_with_braces() -> None:
    _, user = opening("Use {x} and {}", seconds=120.0, most=10, steps=3)
    assert str(user.content).startswith("Use {x} and {}\n")
    assert "after 120 seconds" in str(user.content)


# Options


def test_options_are_part_of_a_run() -> None:
    assert "vanillux" in names()
    given = {"sandbox": "local", "unsafe_local": "true", "steps": "5", "command_seconds": "1.5"}
    options = find("vanillux", given).options
    assert options["sandbox"] == "local"
    assert (options["steps"], options["command_seconds"]) == (5, 1.5)
    assert "unsafe_local" not in options
    for name, value in (
        ("steps", "0"),
        ("memory", "x"),
        ("sandbox", "jail"),
        ("total_seconds", "inf"),
    ):
        with pytest.raises(UsageError, match=name):
            find("vanillux", {**given, name: value})
