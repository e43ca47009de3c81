"""OpenAI's own client for Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.clients.environments import HERE, python_of
from tests.clients.through_kills import Harness

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

COUNT = 6


def play(path: Path) -> Path:
    """What the engine says in `converse.py`."""
    scenes: list[dict[str, Any]] = []
    for i in range(COUNT):
        first, second = f"chat {i}, first", f"chat {i}, second"
        calls = [{"name": "weather", "arguments": {"city": city}} for city in (f"Oslo {i}", "Rome")]
        scenes += [
            {"users": [first], "answers": [{"content": f"one {i}"}]},
            {"users": [first, second], "answers": [{"content": f"two {i}"}]},
            {"users": [f"stream {i}"], "answers": [{"content": f"a stream that flows {i}"}]},
            {"users": [f"weather {i}"], "answers": [{"tool_calls": calls}, {"content": "wet"}]},
        ]
    path.write_text("".join(json.dumps(scene) + "\n" for scene in scenes))
    return path


def said(folder: Path) -> Any:
    return json.loads((folder / "said.json").read_text())


def test_chat_streams_and_tools_go_through_kills(harness: Harness, tmp_path: Path) -> None:
    python, script = python_of("openai_python"), HERE / "openai_python" / "converse.py"
    harness.goes_through_kills(
        lambda _: (python, script, str(COUNT)),
        said,
        "--play",
        str(play(tmp_path / "play.jsonl")),
    )
    expected = [
        answer
        for i in range(COUNT)
        for answer in (
            [f"one {i}", f"two {i}"],
            [f"a stream that flows {i}", 5],
            [f"Oslo {i}", "Rome", "wet"],
        )
    ]
    assert said(tmp_path / "killed") == expected
