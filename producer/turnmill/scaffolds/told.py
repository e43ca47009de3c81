"""What a model has said, as it is told to the model again."""

from __future__ import annotations

import json
from typing import Any

from turnmill.turn import Message


def told_again(message: Message) -> Message:
    """The message, with calls that chat templates can read: calls without an id, or with another's, have one of their own, and
    arguments that are no JSON object are put into one, for most templates, and engines, refuse them. Good calls stay as they are."""
    if not message.tool_calls:
        return message
    told: list[dict[str, Any]] = []
    ids: set[str] = set()
    for number, raw in enumerate(message.tool_calls):
        id = raw.get("id")
        if not isinstance(id, str) or not id or id in ids:
            id = f"call_{number}"
            while id in ids:
                id += "_"
        ids.add(id)
        function = function_of(raw)
        name = function.get("name")
        again = {
            "name": name if isinstance(name, str) else "",
            "arguments": _as_text(function.get("arguments")),
        }
        told.append({**raw, "id": id, "type": "function", "function": again})
    return message.model_copy(update={"tool_calls": told})


def function_of(call: dict[str, Any]) -> dict[str, Any]:
    """What a call names: `name` and `arguments`, of which nothing need be right."""
    function = call.get("function")
    return function if isinstance(function, dict) else {}


def json_object(given: Any, strict: bool = False) -> dict[str, Any] | None:
    """The arguments of a call: None if they are no JSON object. Unless `strict`, its strings may have line breaks as they are, as
    models write them: what is meant is clear."""
    if isinstance(given, str):
        try:
            given = json.loads(given, strict=strict, parse_constant=_no_number)
        except (ValueError, RecursionError):
            return None
    return given if isinstance(given, dict) else None


def _as_text(given: Any) -> str:
    if isinstance(given, str) and json_object(given, strict=True) is not None:
        return given
    arguments = json_object(given)
    if arguments is None:
        arguments = {"malformed": given if isinstance(given, str) else repr(given)}
    return json.dumps(arguments)


def _no_number(name: str) -> None:
    """`NaN` and `Infinity` are Python's own."""
    raise ValueError(f"{name} is no JSON")
