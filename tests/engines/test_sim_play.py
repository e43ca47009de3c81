"""The scripted engine plays what is written: texts, tool calls, in their order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.engines.asking import ask, turn

from turnmill.errors import UsageError
from turnmill_worker.engines.base import EngineSettings, InvalidRequest
from turnmill_worker.engines.sim import SimEngine, build

CALL = {"name": "weather", "arguments": {"city": "Tromsø"}}
PLAY: list[dict[str, Any]] = [
    {"users": ["Weather?"], "answers": [{"tool_calls": [CALL, CALL]}, {"content": "It  rains."}]},
    {"users": ["Weather?", "Thanks"], "answers": [{"content": "Ask again"}]},
]
TOOLS = [{"type": "function", "function": {"name": "weather"}}]


def playing(path: Path, *scenes: dict[str, Any] | str) -> SimEngine:
    lines = [scene if isinstance(scene, str) else json.dumps(scene) for scene in scenes]
    path.write_text("\n".join(lines))
    return build(EngineSettings(arguments=("--play", str(path))))


async def test_a_conversation_is_played(tmp_path: Path):
    engine = playing(tmp_path / "play.jsonl", *PLAY)
    history: list[Any] = [{"role": "system", "content": "Be brief"}, "Weather?"]
    first = await ask(engine, turn(*history, tools=TOOLS))
    assert (first.finish, first.message["content"]) == ("tool_calls", None)
    one, two = first.message["tool_calls"]
    assert one["function"] == {
        "name": "weather",
        "arguments": json.dumps(CALL["arguments"], ensure_ascii=False),
    }
    assert one["id"] != two["id"]
    assert await ask(engine, turn(*history, tools=TOOLS)) == first
    history += [first.message]
    history += [
        {"role": "tool", "tool_call_id": call["id"], "content": "2 C"} for call in (one, two)
    ]
    second = await ask(engine, turn(*history, tools=TOOLS))
    assert (second.finish, second.message["content"]) == ("stop", "It  rains.")
    last = await ask(engine, turn(*history, second.message, "Thanks", tools=TOOLS, max_tokens=1))
    assert (last.finish, last.message["content"]) == ("length", "Ask")


async def test_arguments_that_are_no_json_are_played_as_they_are(tmp_path: Path):
    call = {"name": "weather", "arguments": '{"city": '}
    engine = playing(
        tmp_path / "play.jsonl", {"users": ["Hi"], "answers": [{"tool_calls": [call]}]}
    )
    answer = await ask(engine, turn("Hi", tools=TOOLS))
    assert answer.message["tool_calls"][0]["function"]["arguments"] == '{"city": '


@pytest.mark.parametrize(
    ("history", "tools", "says"),
    [
        (("Whether?",), TOOLS, 'no scene for \\["Whether\\?"\\]'),
        (
            ("Weather?", *[{"role": "assistant", "content": "?"}] * 2),
            TOOLS,
            "2 answers to 'Weather",
        ),
    ],
)
async def test_what_is_not_in_the_play_is_refused(
    tmp_path: Path, history: Any, tools: Any, says: str
):
    engine = playing(tmp_path / "play.jsonl", *PLAY)
    with pytest.raises(InvalidRequest, match=says):
        await ask(engine, turn(*history, tools=tools))


async def test_only_tools_that_are_offered_are_called(tmp_path: Path):
    engine = playing(tmp_path / "play.jsonl", *PLAY)
    for tools in (None, [{"type": "function", "function": {"name": "time"}}]):
        answer = await ask(engine, turn("Weather?", tools=tools))
        assert (answer.finish, answer.message["content"]) == ("stop", "")
        assert "tool_calls" not in answer.message


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 3: Invalid JSON"),
        ({"users": [], "answers": []}, "line 3: users: Tuple should have at least 1 item"),
        ({"users": ["a"], "answers": [{"text": "b"}]}, "line 3: answers.0.text: Extra inputs"),
        ({"users": ["Weather?"], "answers": [{"content": "b"}]}, "line 3: .* answered otherwise"),
    ],
)
def test_a_play_that_is_none(tmp_path: Path, line: Any, says: str):
    with pytest.raises(UsageError, match=says):
        playing(tmp_path / "play.jsonl", *PLAY, line)


def test_a_play_that_is_not_there():
    with pytest.raises(UsageError, match=r"--play nowhere.jsonl: No such file"):
        build(EngineSettings(arguments=("--play", "nowhere.jsonl")))
