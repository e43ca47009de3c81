"""Tokens of a growing answer as an engine keeps them: ids, and log probabilities where they were asked for."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

_HEAD = struct.Struct("<BB")


class KeptToken(NamedTuple):
    """`top`: the likeliest tokens at this place, each with its log probability."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[float, int], ...] = ()


def pack_tokens(tokens: Sequence[KeptToken]) -> bytes:
    """Two bytes: whether there are log probabilities, and how many of the likeliest tokens; then per token,
    little-endian: id (4 bytes), log probability (8), and for each of the likeliest: 8 and 4. Raises ValueError if
    they are not all alike."""
    logprobs, width = tokens[0].logprob is not None, len(tokens[0].top)
    row = _row(logprobs, width)
    packed = bytearray(_HEAD.pack(logprobs, width))
    for token in tokens:
        if (token.logprob is not None) is not logprobs or len(token.top) != width:
            raise ValueError("tokens of one answer with different log probabilities")
        of_it = () if token.logprob is None else (token.logprob,)
        packed += row.pack(token.id, *of_it, *(value for pair in token.top for value in pair))
    return bytes(packed)


def unpack_tokens(data: bytes) -> list[KeptToken]:
    """The tokens of a part. Raises ValueError if it is damaged."""
    try:
        logprobs, width = _HEAD.unpack_from(data)
        rows = _row(bool(logprobs), width).iter_unpack(data[_HEAD.size :])
        if not logprobs:
            return [KeptToken(id) for (id,) in rows]
        return [
            KeptToken(id, logprob, tuple(zip(top[::2], top[1::2], strict=True)))
            for id, logprob, *top in rows
        ]
    except struct.error as error:
        raise ValueError(f"kept tokens are damaged: {error}") from None


def _row(logprobs: bool, width: int) -> struct.Struct:
    return struct.Struct("<I" + "d" * logprobs + "dI" * width)
