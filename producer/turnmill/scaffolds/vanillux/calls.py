"""What an answer calls for, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from turnmill.scaffolds.told import function_of, json_object, told_again
from turnmill.scaffolds.vanillux.prompts import NO_COMMAND, NO_JSON, NO_TEXT, unknown_tool
from turnmill.turn import Message


@dataclass(frozen=True)
class Call:
    """One call of an answer: a command, or why it is none (`wrong`)."""

    id: str
    command: str = ""
    wrong: str | None = None


def understand(message: Message) -> tuple[Message, list[Call]]:
    """The calls of an answer, and the answer as it is told to the model again."""
    again = told_again(message)
    calls: list[Call] = []
    for raw, told in zip(message.tool_calls or (), again.tool_calls or (), strict=True):
        function = function_of(raw)
        arguments = json_object(function.get("arguments"))
        calls.append(_call(told["id"], function.get("name"), arguments))
    return again, calls


def _call(id: str, name: Any, arguments: dict[str, Any] | None) -> Call:
    if name != "bash":
        return Call(id, wrong=unknown_tool(name))
    if arguments is None:
        return Call(id, wrong=NO_JSON)
    command = arguments.get("command")
    if not isinstance(command, str) or not command.strip():
        return Call(id, wrong=NO_COMMAND)
    try:
        if b"\0" in command.encode():
            return Call(id, wrong=NO_TEXT)
    except UnicodeEncodeError:
        return Call(id, wrong=NO_TEXT)
    return Call(id, command)
