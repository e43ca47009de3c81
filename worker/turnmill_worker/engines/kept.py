"""Answers kept while they grow: the engines' side.

What a worker keeps of a growing answer is a sequence of parts: tokens from an offset on, in the engine's own
bytes. A later part says more of the answer, or says again, from its offset, how it goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from turnmill.turn import Turn

Token = TypeVar("Token")


class Part(NamedTuple):
    """`length` tokens of an answer, from token `offset` on."""

    offset: int
    length: int
    data: bytes


def can_go_on(turn: Turn) -> bool:
    """Whether an answer that goes on from its first tokens is drawn as one made at once would be. Not with a seed, a
    grammar or a penalty: they remember what came before, and an engine that goes on does not."""
    sampling = turn.sampling
    return (
        sampling.seed is None
        and not sampling.min_tokens
        and not sampling.frequency_penalty
        and not sampling.presence_penalty
        and sampling.repetition_penalty in (None, 1)
        and (turn.response_format or {}).get("type", "text") == "text"
        and (turn.tool_choice is None or turn.tool_choice in ("none", "auto"))
    )


def can_be_told(turn: Turn) -> bool:
    """Whether readers may be told of an answer while it grows: it could go on elsewhere, and its text is its content. Where
    there are tools, text may yet become a call."""
    return can_go_on(turn) and not turn.tools


def joined(parts: Sequence[Part], read: Callable[[bytes], list[Token]]) -> list[Token]:
    """The tokens of an answer so far, up to the first part that is damaged (`read` raises ValueError) or does
    not fit."""
    tokens: list[Token] = []
    for part in parts:
        try:
            new = read(part.data)
        except ValueError:
            break
        if part.offset > len(tokens) or len(new) != part.length:
            break
        tokens[part.offset :] = new
    return tokens


def settled(count: int, text: Callable[[int], str], stops: Sequence[str]) -> int:
    """With how many of `count` tokens an answer can go on so that it is as one made at once. `text(n)` is the
    text of the first n. An engine looks for stop strings, and for the other half of a character, only in
    what it makes itself: so neither may begin in what it is given."""
    while count and not ends_whole(text(count), stops):
        count -= 1
    return count


def ends_whole(text: str, stops: Sequence[str]) -> bool:
    """Whether a text ends neither inside a character nor with what may begin a stop string."""
    if text.endswith("\N{REPLACEMENT CHARACTER}"):
        return False
    return not any(
        text.endswith(stop[:length]) for stop in stops for length in range(1, len(stop) + 1)
    )
