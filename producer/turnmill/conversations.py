"""Input files: one conversation a line, in turnmill's own shape or as MT-Bench has them.

{"id": "de-brot", "system": "Sei kurz.", "turns": ["Wie backe ich Brot?"], "sampling": {...}}
{"question_id": 81, "category": "writing", "turns": ["...", "..."]}
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from turnmill.canonical import canonical
from turnmill.errors import BadInput, BadLines
from turnmill.turn import Message, Sampling, Tool

MAX_DEPTH: Final = 100
"""Levels of nesting in a line. What is deeper breaks some JSON reader on its way to the engine."""

_BOM: Final = b"\xef\xbb\xbf"
_MT_BENCH_ONLY: Final = {"question_id", "category", "reference"}
_NOT_IN_A_LINE: Final = {"Cc", "Zl", "Zp"}
_SHOWN_PROBLEMS: Final = 3
_IN_OUR_WORDS: Final = {
    "extra_forbidden": "unknown key",
    "list_type": "must be a list",
    "missing": "is missing",
    "model_type": "must be an object",
    "string_type": "must be a string",
    "too_short": "must have at least one",
}


def _identifier(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise _problem("must be a string or an integer")
    if not value.strip():
        raise _problem("must not be empty")
    if any(unicodedata.category(character) in _NOT_IN_A_LINE for character in value):
        raise _problem("must be one line, without control characters")
    return value


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


@dataclass(frozen=True)
class Loaded:
    """What an input file held: the good conversations in its order, and the lines left out."""

    conversations: list[Conversation]
    bad: list[BadInput]


def read_conversations(path: str | Path, skip_bad: bool = False) -> Loaded:
    """The conversations of a file of JSON lines; `-` is standard input. Blank lines are ignored.

    The whole file is checked before anything is said: raises BadLines with all the lines that are
    wrong, and with `skip_bad` only when no line is good. Raises BadInput if there is no such file,
    or nothing in it.
    """
    name = "<stdin>" if str(path) == "-" else str(path)
    conversations: list[Conversation] = []
    bad: list[BadInput] = []
    first_line: dict[str, int] = {}
    with _opened(name, path) as file:
        for number, raw in enumerate(file, start=1):
            raw = (raw.removeprefix(_BOM) if number == 1 else raw).rstrip()
            if not raw:
                continue
            try:
                conversation = _conversation(raw)
                seen = first_line.setdefault(conversation.id, number)
                if seen != number:
                    raise ValueError(f"id {conversation.id!r} is taken by line {seen}")
            except ValueError as error:
                bad.append(BadInput(name, number, _printable(str(error))))
            else:
                conversations.append(conversation)
    if not conversations and not bad:
        raise BadInput(name, 0, "there is no conversation in it")
    if bad and not (skip_bad and conversations):
        raise BadLines(bad)
    return Loaded(conversations, bad)


@contextmanager
def _opened(name: str, path: str | Path) -> Iterator[BinaryIO]:
    try:
        if name == "<stdin>":
            yield sys.stdin.buffer
        else:
            with open(path, "rb") as file:
                yield file
    except OSError as error:
        raise BadInput(name, 0, f"cannot be read: {error.strerror or error}") from None


def _conversation(raw: bytes) -> Conversation:
    """Raises ValueError with what is wrong."""
    fields = _object(raw)
    id_key = "question_id" if "question_id" in fields else "id"
    if id_key == "question_id":
        if "id" in fields:
            raise ValueError("has both id and question_id")
        fields = {
            "id": fields["question_id"],
            **{key: value for key, value in fields.items() if key not in _MT_BENCH_ONLY},
        }
    try:
        return Conversation.model_validate(fields)
    except ValidationError as error:
        raise ValueError(_what(error, id_key)) from None


def _object(raw: bytes) -> dict[str, Any]:
    """A line's JSON object, with nothing in it that cannot be hashed. Raises ValueError."""
    try:
        fields = json.loads(raw.decode(), object_pairs_hook=_without_doubles, parse_int=_integer)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {error.start + 1} of the line") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}, column {error.colno}") from None
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH}") from None
    if not isinstance(fields, dict):
        raise ValueError("must be a JSON object")
    _check(fields, "")
    return fields


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        keys = [key for key, _ in pairs]
        double = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {double!r} is there twice")
    return fields


def _integer(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:
        raise ValueError(f"an integer of {len(digits)} digits is too long") from None


def _check(value: Any, where: str, depth: int = 1) -> None:
    """Python's JSON takes more than JSON is: say here, and where, what could not be hashed."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError(f"{where}: half a surrogate pair")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where}: must be a finite number")
    elif isinstance(value, dict):
        for key, item in value.items():
            inside = f"{where}.{key}" if where else key
            _check(key, inside)
            _check(item, inside, depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check(item, f"{where}.{index}", depth + 1)


def _problem(text: str) -> PydanticCustomError:
    return PydanticCustomError("conversation", "{text}", {"text": text})


def _what(error: ValidationError, id_key: str) -> str:
    """The first problems of a line: which field, and what about it. `id_key` is what it calls its id."""
    problems = error.errors(include_url=False, include_input=False)
    texts = [_one_problem(problem, id_key) for problem in problems[:_SHOWN_PROBLEMS]]
    if len(problems) > _SHOWN_PROBLEMS:
        texts.append(f"and {len(problems) - _SHOWN_PROBLEMS} more")
    return "; ".join(texts)


def _one_problem(problem: ErrorDetails, id_key: str) -> str:
    kind, steps = problem["type"], [str(step) for step in problem["loc"]]
    steps = [id_key] if steps == ["id"] else steps
    text = _IN_OUR_WORDS.get(kind, problem["msg"])
    if kind == "extra_forbidden":
        known = Sampling.model_fields if steps[0] == "sampling" else Conversation.model_fields
        if close := get_close_matches(steps[-1], known, n=1):
            text = f"{text}, did you mean {close[0]}?"
    return f"{'.'.join(steps)}: {text}"


def _printable(text: str) -> str:
    """One line for a terminal, whatever was in the file."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
