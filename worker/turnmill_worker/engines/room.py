"""How many tokens a turn may make, before the engine sees its prompt. Nothing is ever truncated
silently: a prompt that does not fit is `NoRoom`, an answer that cannot be whole gets a smaller cap."""

from __future__ import annotations

from typing import NamedTuple

from turnmill.reply import Cap
from turnmill_worker.engines.base import NoRoom


class Room(NamedTuple):
    """`max_tokens` to send to the engine, and which limit that is: the turn's own or the context's.
    `limit` is that limit in tokens: max_tokens as asked, or the context length."""

    max_tokens: int
    limited_by: Cap
    limit: int


def room(
    prompt_tokens: int, asked: int | None, *, context: int, max_prompt: int | None = None
) -> Room:
    """The room for an answer to a prompt of `prompt_tokens`, when `asked` tokens are wanted (None:
    as many as there are). `context` bounds prompt and answer together, `max_prompt` (if the engine
    has such a limit, and it is smaller) the prompt alone. Raises NoRoom."""
    if max_prompt is not None and prompt_tokens > max_prompt:
        raise NoRoom(prompt_tokens, max_prompt)
    left = context - prompt_tokens
    if left < 1:
        raise NoRoom(prompt_tokens, context)
    if asked is not None and asked <= left:
        return Room(asked, "output", asked)
    return Room(left, "context", context)


def met(space: Room, length: int | None, prompt_tokens: int) -> tuple[Cap | None, int | None]:
    """Which limit an answer met that ended after `length` tokens (None: it met none), and how many tokens that is."""
    if length is None:
        return None, None
    if length < space.max_tokens:  # a limit of the engine's own, which it applies silently
        return "context", prompt_tokens + length
    return space.limited_by, space.limit
