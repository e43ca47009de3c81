"""pydantic-ai, over its model for chat completions."""

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
SCRIPTS = HERE / "pydantic_ai"


@pytest.fixture(scope="module")
def python() -> Path:
    return python_of("pydantic_ai")


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def play(path: Path) -> Path:
    """What the engine says in `converse.py`. A structured output is a call of the tool `final_result`."""
    scenes: list[dict[str, Any]] = []
    for i in range(COUNT):
        trip, back, city = f"trip {i}", f"and back {i}", f"Oslo {i}"
        both = [call("weather", city=city), call("degrees", city=city)]
        one = [call("degrees", city="Rome", scale="K")]
        output = [call("final_result", city=city, degrees=i)]
        scenes += [
            {"users": [trip], "answers": [{"tool_calls": both}, {"content": f"wet {i}"}]},
            {"users": [trip, back], "answers": [{"tool_calls": one}, {"content": "dry"}]},
            {"users": [f"forecast {i}"], "answers": [{"tool_calls": output}]},
            {"users": [f"stream {i}"], "answers": [{"content": f"a stream that flows {i}"}]},
        ]
    path.write_text("".join(json.dumps(scene) + "\n" for scene in scenes))
    return path


def said(folder: Path) -> Any:
    return json.loads((folder / "said.json").read_text())


def test_agents_go_through_kills(harness: Harness, python: Path, tmp_path: Path) -> None:
    harness.goes_through_kills(
        lambda _: (python, SCRIPTS / "converse.py", str(COUNT)),
        said,
        "--play",
        str(play(tmp_path / "play.jsonl")),
    )

    def returned(city: str, scale: str) -> dict[str, Any]:
        return {"city": city, "degrees": len(city), "scale": scale}

    expected = [
        answer
        for i in range(COUNT)
        for answer in (
            [
                [f"It rains in Oslo {i}", returned(f"Oslo {i}", "C"), returned("Rome", "K")],
                f"wet {i}",
                "dry",
            ],
            [f"Oslo {i}", i],
            [f"a stream that flows {i}", 5],
        )
    ]
    assert said(tmp_path / "killed") == expected


def test_errors_are_its_own(refusals: Refusals, python: Path) -> None:
    assert refusals.run(python, SCRIPTS / "refusals.py") == {
        "busy": ["one", "two"],
        "late": "late",
        "long": ["ModelContextWindowExceededError", 400],
        "model": ["ModelNotFoundError", 404],
        "key": ["ModelAuthenticationError", 401],
    }
