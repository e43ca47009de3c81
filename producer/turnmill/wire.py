"""Models to bytes and back. The wire is JSON with a version, compressed when that pays."""

from __future__ import annotations

import zlib
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError, from_json, to_json, to_jsonable_python

from turnmill.errors import NewerRecord, RecordError
from turnmill.turn import Turn, explain

WIRE_VERSION = 1
COMPRESS_FROM = 2048
"""Bytes. At this size, text of conversations loses nearly half for some 50 µs, about as long as hashing takes;
smaller records would cost as much and save a few hundred bytes."""

_ZLIB = b"Z"
LARGEST = 256 << 20
"""Bytes of a record once it is unpacked: a few kB of zlib can hold gigabytes, which would end who reads them."""

Model = TypeVar("Model", bound=BaseModel)


def pack(data: bytes) -> bytes:
    """JSON bytes as they are stored: as they are, or `Z` and a zlib stream when that is smaller."""
    if len(data) < COMPRESS_FROM:
        return data
    packed = _ZLIB + zlib.compress(data, 1)
    return packed if len(packed) < len(data) else data


def unpack(data: bytes) -> bytes:
    """The JSON bytes of a stored record. Raises RecordError if they are damaged or too many."""
    if data[:1] != _ZLIB:
        return data
    stream = zlib.decompressobj()
    try:
        whole = stream.decompress(data[1:], LARGEST)
    except zlib.error as error:
        raise RecordError(f"a compressed record is damaged: {error}") from None
    if stream.unconsumed_tail:
        raise RecordError(f"a compressed record holds more than {LARGEST >> 20} MB")
    if not stream.eof:
        raise RecordError("a compressed record is damaged: its end is missing")
    return whole


def encode(record: BaseModel | dict[str, Any]) -> bytes:
    """A reply, failure or trace as stored bytes, or the fields of one: to make a model only for this takes longer
    than all the rest."""
    try:
        text = to_json(record, exclude_none=True, inf_nan_mode="null")
    except PydanticSerializationError:
        whole = without_half_pairs(to_jsonable_python(record, exclude_none=True))
        text = to_json(whole, inf_nan_mode="null")
    return pack(b'{"v":%d,%s' % (WIRE_VERSION, text[1:]))


def without_half_pairs(value: Any) -> Any:
    """Half a surrogate pair, which an engine can make and UTF-8 has not, becomes U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    if isinstance(value, dict):
        return {key: without_half_pairs(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_half_pairs(item) for item in value]
    return value


def decode(model: type[Model], data: bytes) -> Model:
    """A stored record. Raises NewerRecord, or RecordError with the reason."""
    try:
        return model.model_validate(_fields(data))
    except ValidationError as error:
        raise RecordError(explain(error)) from None


def encode_turn(turn: Turn) -> bytes:
    return pack(turn.body)


def decode_turn(data: bytes) -> Turn:
    """The turn of a stored body. Raises NewerRecord, RecordError, or BadTurn with the fields."""
    return Turn.from_body(_fields(data))


def _fields(data: bytes) -> dict[str, Any]:
    """The fields of a stored record that this version can read."""
    try:
        fields = from_json(unpack(data), allow_inf_nan=False)
    except ValueError as error:
        raise RecordError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RecordError("not a JSON object")
    version = fields.pop("v", None)
    if not isinstance(version, int):
        raise RecordError("no wire version")
    if version > WIRE_VERSION:
        raise NewerRecord(f"wire version {version}; this turnmill reads up to {WIRE_VERSION}")
    return fields
