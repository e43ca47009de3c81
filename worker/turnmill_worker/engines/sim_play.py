"""A play for the scripted engine: what it answers, and which tools it calls, conversation by conversation.

A file of JSON lines, `{"users": [TEXT, ...], "answers": [MESSAGE, ...]}`: once the user messages of a conversation are
these, the first answer is the first message, the next one (after the tools that it called have answered) the second,
and so on. System and tool messages have no say. A message has `content`, or `tool_calls`, or both; calls without an
id get one that is the same whenever the turn is; arguments that are a text are answered as it is, as by a model that writes
no JSON. Tools that the turn does not offer are not called.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turnmill.errors import UsageError
from turnmill.turn import Message, Turn
from turnmill_worker.engines.base import InvalidRequest


class _Call(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: str | None = None
    name: str
    arguments: dict[str, Any] | str


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid")

    content: str | None = None
    tool_calls: tuple[_Call, ...] = ()


class _Scene(BaseModel):
    model_config = ConfigDict(extra="forbid")

    users: Annotated[tuple[str, ...], Field(min_length=1)]
    answers: Annotated[tuple[_Line, ...], Field(min_length=1)]


class Play:
    """A play that was read from its file. Raises UsageError for one that is none; two scenes of the same users must
    have the same answers."""

    def __init__(self, path: Path) -> None:
        self._scenes: dict[tuple[str, ...], tuple[_Line, ...]] = {}
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"--play {path}: {getattr(error, 'strerror', None) or error}"
            ) from None
        for number, line in enumerate(lines, 1):
            try:
                scene = _Scene.model_validate_json(line)
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"]))
                raise UsageError(
                    f"--play {path}, line {number}: {where + ': ' if where else ''}{first['msg']}"
                ) from None
            if self._scenes.setdefault(scene.users, scene.answers) != scene.answers:
                raise UsageError(
                    f"--play {path}, line {number}: these users were answered otherwise before"
                )

    def answer(self, turn: Turn, text: Callable[[Message], str]) -> dict[str, Any]:
        """The assistant message for a turn, in OpenAI's shape. `text`: what a message says. Raises InvalidRequest
        where the play does not go on."""
        users = tuple(text(message) for message in turn.messages if message.role == "user")
        lines = self._scenes.get(users)
        if lines is None:
            raise InvalidRequest(f"the play has no scene for {json.dumps(users)[:300]}")
        since = 0
        for message in turn.messages:
            since = 0 if message.role == "user" else since + (message.role == "assistant")
        if since >= len(lines):
            raise InvalidRequest(f"the play has {len(lines)} answers to {users[-1][:300]!r}")
        line = lines[since]
        offered = {(tool.function or {}).get("name") for tool in turn.tools or ()}
        calls = [
            _call(call, f"call_{turn.hash[:20]}{i}")
            for i, call in enumerate(line.tool_calls)
            if call.name in offered
        ]
        if not calls:
            return {"role": "assistant", "content": line.content or ""}
        return {"role": "assistant", "content": line.content, "tool_calls": calls}


def _call(call: _Call, name: str) -> dict[str, Any]:
    arguments = call.arguments
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id or name, "type": "function", "function": function}
