"""Input files of JSON lines: an object a line, checked whole before anything is asked."""

from __future__ import annotations

import json
import math
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, Generic, Protocol, TypeVar

from turnmill.errors import BadInput, BadLines

MAX_DEPTH: Final = 100
"""Levels of nesting in a line. What is deeper breaks some JSON reader on its way to the engine."""

_NOT_IN_A_LINE: Final = {"Cc", "Zl", "Zp"}
_BOM: Final = b"\xef\xbb\xbf"


class Item(Protocol):
    """One of the things that a scaffold drives conversations about.

    `id` tells it from the others of its file; `digest` is equal if and only if all of it is.
    """

    @property
    def id(self) -> str: ...

    @property
    def digest(self) -> str: ...


ItemT = TypeVar("ItemT", bound=Item)


@dataclass(frozen=True)
class Loaded(Generic[ItemT]):
    """What an input file held: the good items in its order, and the lines left out."""

    items: list[ItemT]
    bad: list[BadInput]


def check_id(value: Any) -> str:
    """The id of an item. Raises ValueError with what is wrong."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ValueError("must be a string or an integer")
    if not value.strip():
        raise ValueError("must not be empty")
    if any(unicodedata.category(character) in _NOT_IN_A_LINE for character in value):
        raise ValueError("must be one line, without control characters")
    return value


Parsed = tuple[int, Callable[[], dict[str, Any]]]
"""A line: its number, and what makes its object, or raises ValueError with what is wrong."""


def read_lines(
    path: str | Path, parse: Callable[[dict[str, Any]], ItemT], skip_bad: bool = False
) -> Loaded[ItemT]:
    """The items of a file of JSON lines; `-` is standard input. Blank lines are ignored. `parse` makes an
    item of a line's object, or raises ValueError with what is wrong.

    The whole file is checked before anything is said: raises BadLines with all the lines that are
    wrong, and with `skip_bad` only when no line is good. Raises BadInput if there is no such file,
    or nothing in it.
    """
    name = "<stdin>" if str(path) == "-" else str(path)
    with opened(name, path) as file:
        return load(name, _lines(file), parse, skip_bad)


def load(
    name: str,
    lines: Iterable[Parsed],
    parse: Callable[[dict[str, Any]], ItemT],
    skip_bad: bool,
) -> Loaded[ItemT]:
    """The items of these lines, of a file of this name, as `read_lines` has it."""
    items: list[ItemT] = []
    bad: list[BadInput] = []
    first_line: dict[str, int] = {}
    for number, fields in lines:
        try:
            item = parse(fields())
            seen = first_line.setdefault(item.id, number)
            if seen != number:
                raise ValueError(f"id {item.id!r} is taken by line {seen}")
        except ValueError as error:
            bad.append(BadInput(name, number, _printable(str(error))))
        else:
            items.append(item)
    if not items and not bad:
        raise BadInput(name, 0, "there is no conversation in it")
    if bad and not (skip_bad and items):
        raise BadLines(bad)
    return Loaded(items, bad)


def _lines(file: BinaryIO) -> Iterator[Parsed]:
    for number, raw in enumerate(file, start=1):
        raw = (raw.removeprefix(_BOM) if number == 1 else raw).rstrip()
        if raw:
            yield number, partial(json_object, raw)


@contextmanager
def opened(name: str, path: str | Path) -> Iterator[BinaryIO]:
    """The file, or standard input. Raises BadInput if it cannot be opened or read."""
    try:
        if name == "<stdin>":
            yield sys.stdin.buffer
        else:
            with open(path, "rb") as file:
                yield file
    except OSError as error:
        raise BadInput(name, 0, f"cannot be read: {error.strerror or error}") from None


def json_object(raw: bytes) -> dict[str, Any]:
    """An object of JSON text, with nothing in it that cannot be hashed. Raises ValueError."""
    try:
        fields = json.loads(raw.decode(), object_pairs_hook=_without_doubles, parse_int=_integer)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {error.start + 1} of the line") from None
    except json.JSONDecodeError as error:
        # Some of Python's texts end in "at", for a place that is to follow.
        raise ValueError(
            f"not JSON: {error.msg.removesuffix(' at')}, column {error.colno}"
        ) from None
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH}") from None
    if not isinstance(fields, dict):
        raise ValueError("must be a JSON object")
    _check(fields, "")
    return fields


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        double = first_double(key for key, _ in pairs)
        raise ValueError(f"the key {double!r} is there twice")
    return fields


def first_double(names: Iterable[str]) -> str | None:
    """The first of these names that is there more than once."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


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


def _printable(text: str) -> str:
    """One line for a terminal, whatever was in the file."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
