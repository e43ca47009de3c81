"""Multi-IF's rows (CSV, or JSON lines) as conversations: turns in columns, each a JSON text of a message.

key,turn_1_prompt,...,turn_2_prompt,...,turn_3_prompt,...,language
1019:16:en,"{""role"": ""user"", ""content"": ""...""}",...
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from turnmill.lines import json_object

ID: Final = "key"
FIRST: Final = "turn_1_prompt"
_PROMPT: Final = re.compile(r"turn_([1-9][0-9]?)_prompt")


def conversation_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """`id` and `turns` of a row; its other columns are left out. Later turns that are empty are turns that it has not.
    Raises ValueError with what is wrong."""
    if ID not in row:
        raise ValueError(f"{ID}: is missing")
    numbered = {int(found[1]): name for name in row if (found := _PROMPT.fullmatch(name))}
    turns: list[dict[str, Any]] = []
    empty = ""
    for _, name in sorted(numbered.items()):
        message = _message(name, row[name])
        if message is None:
            empty = empty or name
        elif empty:
            raise ValueError(f"{name}: comes after {empty}, which is empty")
        else:
            turns.append(message)
    if not turns:
        raise ValueError(f"{FIRST}: is empty")
    return {"id": row[ID], "turns": turns}


def _message(name: str, value: Any) -> dict[str, Any] | None:
    if isinstance(value, str):
        if not value.strip():
            return None
        try:
            value = json_object(value.encode("utf-8", "surrogatepass"))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"{name}: must be the JSON of a message")
    if value.get("role") != "user":
        raise ValueError(f'{name}: must have the role "user"')
    if not isinstance(value.get("content"), str):
        raise ValueError(f"{name}: content must be a string")
    return value
