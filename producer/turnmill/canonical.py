"""RFC 8785 canonical JSON, and what becomes of numbers that it has not."""

from __future__ import annotations

import json
import re
from typing import Any, Final, NamedTuple

import rfc8785
from pydantic_core import PydanticSerializationError, to_json

from turnmill.errors import BadTurn

_MAX_EXACT_INT: Final = 2**53 - 1
_MANY_DIGITS: Final = re.compile(rb"[0-9]{16}")
"""In JSON without it there is no integer beyond 2^53-1."""
_WRITTEN_WITH_EXPONENT: Final = 1e21

_NO_CANONICAL_JSON: Final = (
    rfc8785.CanonicalizationError,
    PydanticSerializationError,
    UnicodeEncodeError,
)

_sorted_json = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode


class Canonical(NamedTuple):
    """A value's canonical JSON in UTF-8: as it is `stored`, and as it is `hashed`. They differ in integers
    beyond 2^53-1 only: hashed, these are `{"$int": "..."}`."""

    stored: bytes
    hashed: bytes


def canonical(value: dict[str, Any]) -> Canonical:
    """Raises BadTurn if the value has no canonical JSON."""
    try:
        return _canonical(value)
    except _NO_CANONICAL_JSON as error:
        raise BadTurn(f"no canonical JSON: {error}") from None


def _canonical(value: dict[str, Any]) -> Canonical:
    try:
        plain = to_json(_plain(value))
        return Canonical(plain, plain)
    except _NotPlain:
        pass
    try:
        stored = rfc8785.dumps(value)
    except rfc8785.IntegerDomainError:
        # JSON numbers are doubles to RFC 8785; tool schemas have larger integers. They are hashed
        # as a tagged decimal string, exactly, and stored as they are.
        hashed = rfc8785.dumps(_tag(value))
        return Canonical(_sorted_json(value).encode(), hashed)
    # A float like 1e20 is written as an integer, and will be one when it is read again.
    hashed = rfc8785.dumps(_tag(value)) if _MANY_DIGITS.search(stored) else stored
    return Canonical(stored, hashed)


class _NotPlain(Exception):
    """JSON as it is usually written would not be the canonical one."""


def _plain(value: Any) -> Any:
    """The same value, such that pydantic's JSON of it, many times faster, is the canonical one.

    They differ in floats that are whole, very large or very small, and in the order of keys, which is made here
    for those in ASCII.
    Raises _NotPlain where the difference stays, for integers beyond 2^53-1, and for what is no JSON.
    """
    kind = type(value)
    if kind is str or value is None or kind is bool:
        return value
    if kind is dict:
        plain = {}
        try:
            keys = sorted(value)
        except TypeError:  # not all of them are strings
            raise _NotPlain from None
        for key in keys:
            if type(key) is not str or not key.isascii():
                raise _NotPlain
            item = value[key]
            plain[key] = item if type(item) is str else _plain(item)
        return plain
    if kind is list:
        return [_plain(item) for item in value]
    if kind is int and -_MAX_EXACT_INT <= value <= _MAX_EXACT_INT:
        return value
    if kind is float:
        if 1e-4 <= abs(value) < 1e15:
            return int(value) if value.is_integer() else value
        if value == 0:
            return 0
    raise _NotPlain


def _tag(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tag(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_tag(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if abs(value) <= _MAX_EXACT_INT:
        return value
    if isinstance(value, int):
        return {"$int": str(value)}
    return {"$int": rfc8785.dumps(value).decode()} if abs(value) < _WRITTEN_WITH_EXPONENT else value
