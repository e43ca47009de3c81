"""litellm, with its own retries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.clients.environments import HERE, python_of
from tests.clients.refusals import Refusals
from tests.clients.through_kills import Harness

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

COUNT = 4
SCRIPTS = HERE / "litellm"
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""It asks the network for prices otherwise."""


@pytest.fixture(scope="module")
def python() -> Path:
    return python_of("litellm")


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
            *(
                {"users": [asked], "answers": [{"tool_calls": calls}, {"content": "wet"}]}
                for asked in (f"weather {i}", f"streamed weather {i}")
            ),
        ]
    path.write_text("".join(json.dumps(scene) + "\n" for scene in scenes))
    return path


def said(folder: Path) -> Any:
    return json.loads((folder / "said.json").read_text())


def test_chat_streams_and_tools_go_through_kills(
    harness: Harness, python: Path, tmp_path: Path
) -> None:
    harness.goes_through_kills(
        lambda _: (python, SCRIPTS / "converse.py", str(COUNT)),
        said,
        "--play",
        str(play(tmp_path / "play.jsonl")),
        **OFFLINE,
    )
    expected = [
        answer
        for i in range(COUNT)
        for answer in (
            [f"one {i}", f"two {i}"],
            [f"a stream that flows {i}", 5],
            [f"Oslo {i}", "Rome", "wet"],
            [f"Oslo {i}", "Rome", "wet"],
        )
    ]
    assert said(tmp_path / "killed") == expected


def test_errors_are_its_own(refusals: Refusals, python: Path) -> None:
    assert refusals.run(python, SCRIPTS / "refusals.py", **OFFLINE) == {
        "busy": ["one", "two"],
        "late": "late",
        "long": ["ContextWindowExceededError", 400],
        "model": ["NotFoundError", 404],
        "key": ["AuthenticationError", 401],
    }
