"""OpenAI's own client for Node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.clients.environments import node_folder
from tests.clients.refusals import Refusals
from tests.clients.through_kills import Harness

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

COUNT = 4


@pytest.fixture(scope="module")
def scripts() -> Path:
    return node_folder("openai_node", "converse.mjs", "refusals.mjs")


def play(path: Path) -> Path:
    """What the engine says in `converse.mjs`."""
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
    harness: Harness, scripts: Path, tmp_path: Path
) -> None:
    harness.goes_through_kills(
        lambda _: ("node", scripts / "converse.mjs", str(COUNT)),
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
            [f"Oslo {i}", "Rome", "wet"],
        )
    ]
    assert said(tmp_path / "killed") == expected


def test_errors_are_its_own(refusals: Refusals, scripts: Path) -> None:
    assert refusals.run("node", scripts / "refusals.mjs") == {
        "busy": ["one", "two"],
        "late": "late",
        "long": ["BadRequestError", "context_length_exceeded"],
        "model": ["NotFoundError", "model_not_found"],
        "key": ["AuthenticationError", "invalid_api_key"],
    }
