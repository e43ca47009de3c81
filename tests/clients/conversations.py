"""What several clients say and hear in their `converse` scripts: chats of two turns, streams, tools, tools in streams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.clients.through_kills import Command, Harness

COUNT = 4


def converses_through_kills(
    harness: Harness,
    command: Command,
    folder: Path,
    *,
    streams_tools: bool = True,
    **environment: str,
) -> None:
    """The command with COUNT as its last argument writes `said.json`: the same through kills, and what the engine said."""

    def said(where: Path) -> Any:
        return json.loads((where / "said.json").read_text())

    play = folder / "play.jsonl"
    play.write_text("".join(json.dumps(scene) + "\n" for scene in _scenes()))
    line = (*command, str(COUNT))
    harness.goes_through_kills(lambda _: line, said, "--play", str(play), **environment)
    expected = []
    for i in range(COUNT):
        tools = [f"Oslo {i}", "Rome", "wet"]
        expected += [[f"one {i}", f"two {i}"], [f"a stream that flows {i}", 5], tools]
        expected += [tools] if streams_tools else []
    assert said(folder / "killed") == expected


def _scenes() -> list[dict[str, Any]]:
    scenes: list[dict[str, Any]] = []
    for i in range(COUNT):
        first, second = f"chat {i}, first", f"chat {i}, second"
        calls = [{"name": "weather", "arguments": {"city": city}} for city in (f"Oslo {i}", "Rome")]
        scenes += [
            {"users": [first], "answers": [{"content": f"one {i}"}]},
            {"users": [first, second], "answers": [{"content": f"two {i}"}]},
            {"users": [f"stream {i}"], "answers": [{"content": f"a stream that flows {i}"}]},
        ]
        for asked in (f"weather {i}", f"streamed weather {i}"):
            scenes.append(
                {"users": [asked], "answers": [{"tool_calls": calls}, {"content": "wet"}]}
            )
    return scenes
