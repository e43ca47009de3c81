"""Growing answers of engines whose tokens we see: what is kept of one, what is told of it, and where it goes on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from turnmill_worker.engines.kept import Part, ends_whole, joined, settled
from turnmill_worker.engines.tokens import KeptToken, pack_tokens, unpack_tokens

Decode = Callable[[list[int]], str]
"""The text of tokens, as the engine's own detokenizer makes it."""

_CONTEXT = 5
"""Tokens before those that are decoded: a tokenizer that joins words decodes differently at the beginning of a text."""

_TAIL = 8
"""Tokens: a character is made of no more."""


class Growing(ABC):
    """What there is of an unfinished answer: tokens taken over from an earlier try, and their text; and those made since.
    Written on the engine's loop thread, read on the worker's."""

    def __init__(self) -> None:
        self.before: list[KeptToken] = []
        self.text_before = ""
        self._ids: list[int] = []
        self._made: tuple[int, str] = (0, "")  # so many tokens, with this text

    @abstractmethod
    def _token(self, index: int, id: int) -> KeptToken:
        """The token `id`, which is number `index` of those made since."""

    def part(self, offset: int) -> Part:
        count, _ = self._made
        first = min(count, max(0, offset - len(self.before)))
        ids = self._ids[first:count]
        made = [self._token(first + index, id) for index, id in enumerate(ids)]
        tokens = [*self.before[offset:], *made]
        return Part(offset, len(tokens), pack_tokens(tokens) if tokens else b"")

    def telling(
        self, stops: Sequence[str], cut: Callable[[list[int]], bool]
    ) -> Callable[[int], str]:
        """What readers may be told (base.py). `cut`: whether tokens end inside a character."""
        settled = ""  # what was made since, up to where the answer could go on

        def since(characters: int) -> str:
            nonlocal settled
            count, text = self._made
            tail = self._ids[max(0, count - _TAIL) : count]
            if len(text) > len(settled) and ends_whole(text, stops) and not cut(tail):
                settled = text
            before = len(self.text_before)
            if characters < before:
                return self.text_before[characters:] + settled
            return settled[characters - before :]

        return since


class Cut:
    """Knows whether tokens end inside a character; engines leave such an end out of their text."""

    def __init__(self) -> None:
        self._known: dict[int, bool] = {}

    def __call__(self, decode: Decode, ids: list[int]) -> bool:
        last = ids[-1]
        if last not in self._known:
            text = decode([last])
            self._known[last] = not text or text.endswith("\N{REPLACEMENT CHARACTER}")
        # By itself such a token may still be the end of a character.
        return self._known[last] and decode(ids).endswith("\N{REPLACEMENT CHARACTER}")


def taken_over(
    kept: Sequence[Part], most: int, decode: Decode, stops: Sequence[str]
) -> list[KeptToken]:
    """The kept tokens, `most` at most, from which an answer goes on."""
    tokens = joined(kept, unpack_tokens)[: max(0, most)]
    ids = [token.id for token in tokens]
    return tokens[: settled(len(ids), lambda n: decode(ids[:n]), stops)]


def text_of(decode: Decode, prompt: list[int], tokens: list[KeptToken]) -> str:
    """The text of an answer's first tokens."""
    context = prompt[-_CONTEXT:]
    return decode(context + [token.id for token in tokens])[len(decode(context)) :]
