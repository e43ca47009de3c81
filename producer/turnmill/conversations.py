"""Input files: one conversation a line, in turnmill's own shape or as MT-Bench or Multi-IF have them.

{"id": "de-brot", "system": "Sei kurz.", "turns": ["Wie backe ich Brot?"], "sampling": {...}}
{"question_id": 81, "category": "writing", "turns": ["...", "..."]}
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from turnmill import multi_if
from turnmill.canonical import canonical
from turnmill.csv_lines import read_csv
from turnmill.lines import Loaded, check_id, read_lines
from turnmill.turn import Message, Sampling, Tool
from turnmill.wording import problems

_MT_BENCH_ONLY: Final = {"question_id", "category", "reference"}


def _identifier(value: Any) -> str:
    try:
        return check_id(value)
    except ValueError as error:
        raise _problem(str(error)) from None


def _user_message(value: Any) -> Any:
    if isinstance(value, Message):
        value = value.model_dump(exclude_none=True)
    if isinstance(value, str | list):
        value = {"role": "user", "content": value}
    if not isinstance(value, dict):
        raise _problem("must be a string, a list of content parts or a user message")
    if value.get("role") != "user":
        raise _problem('a message must have the role "user"')
    content = value.get("content")
    if isinstance(content, str):
        return value
    if not isinstance(content, list) or not content:
        raise _problem("content must be a string or a list of parts")
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise _problem('a content part must be an object with a "type"')
    return value


def _tools(value: Any) -> Any:
    return None if value == [] else value


class Conversation(BaseModel):
    """The user's side of a conversation, and how it is to be answered. Its JSON is an input line.

    `turns` are the user messages, asked one after the other; each may be given as a string, as a
    list of content parts, or as a message of role `user`. Sampling fields that are not set are left
    to the run. An integer `id` becomes a string.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Annotated[str, BeforeValidator(_identifier)]
    system: str | None = None
    turns: Annotated[list[Annotated[Message, BeforeValidator(_user_message)]], Field(min_length=1)]
    sampling: Sampling | None = None
    tools: Annotated[list[Tool] | None, BeforeValidator(_tools)] = None

    @property
    def digest(self) -> str:
        """64 hex digits: SHA-256 over the canonical JSON. Equal conversations have equal digests,
        however their lines were written. Raises BadTurn if there is no canonical JSON."""
        fields = self.model_dump(exclude_none=True)
        return hashlib.sha256(canonical(fields).hashed).hexdigest()


def read_conversations(path: str | Path, skip_bad: bool = False) -> Loaded[Conversation]:
    """The conversations of a file: Multi-IF's CSV if its name ends so, else JSON lines, as `read_lines` reads them."""
    if str(path).lower().endswith(".csv"):
        return read_csv(path, (multi_if.ID, multi_if.FIRST), _conversation, skip_bad)
    return read_lines(path, _conversation, skip_bad)


def _conversation(fields: dict[str, Any]) -> Conversation:
    """Raises ValueError with what is wrong."""
    id_key = "question_id" if "question_id" in fields else "id"
    if multi_if.FIRST in fields:
        id_key, fields = multi_if.ID, multi_if.conversation_of(fields)
    elif id_key == "question_id":
        if "id" in fields:
            raise ValueError("has both id and question_id")
        fields = {
            "id": fields["question_id"],
            **{key: value for key, value in fields.items() if key not in _MT_BENCH_ONLY},
        }
    try:
        return Conversation.model_validate(fields)
    except ValidationError as error:
        raise ValueError(problems(error, Conversation, {"id": id_key})) from None


def _problem(text: str) -> PydanticCustomError:
    return PydanticCustomError("conversation", "{text}", {"text": text})
