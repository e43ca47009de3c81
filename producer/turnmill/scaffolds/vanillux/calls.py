"""What an answer calls for, and what is wrong with it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from turnmill.scaffolds.vanillux.prompts import NO_COMMAND, NO_JSON, NO_TEXT, unknown_tool
from turnmill.turn import Message


@dataclass(frozen=True)
class Call:
    """One call of an answer: a command, or why it is none (`wrong`)."""

    id: str
    command: str = ""
    wrong: str | None = None


def understand(message: Message) -> tuple[Message, list[Call]]:
    """The calls of an answer, and the answer as it is told to the model again: calls without an id, or with another's, have one of
    their own, and arguments that are no JSON object are put into one, for most chat templates break on them."""
    calls: list[Call] = []
    told: list[dict[str, Any]] = []
    for number, raw in enumerate(message.tool_calls or ()):
        id = raw.get("id")
        if not isinstance(id, str) or not id or id in {call.id for call in calls}:
            id = f"call_{number}"
        function = raw.get("function")
        function = function if isinstance(function, dict) else {}
        name, given = function.get("name"), function.get("arguments")
        arguments = _arguments(given)
        calls.append(_call(id, name, arguments))
        if arguments is None:
            text = given if isinstance(given, str) else repr(given)
            arguments = {"malformed": text}
        is_plain = isinstance(given, str) and _arguments(given, strict=True) is not None
        again = given if is_plain else json.dumps(arguments)
        told.append(
            {
                **raw,
                "id": id,
                "type": "function",
                "function": {"name": name if isinstance(name, str) else "", "arguments": again},
            }
        )
    if not calls:
        return message, []
    return message.model_copy(update={"tool_calls": told}), calls


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


def _arguments(given: Any, strict: bool = False) -> dict[str, Any] | None:
    """Models write line breaks into JSON's strings as they are: what is meant is clear."""
    if isinstance(given, str):
        try:
            given = json.loads(given, strict=strict)
        except (ValueError, RecursionError):
            return None
    return given if isinstance(given, dict) else None
