"""What readers are told of one turn's answer while it grows.

Tries that go on from each other tell one line of text, named by the claim token of the try that began it. A try that
cannot go on from what was told begins another line, and says so: whoever has read of the old one hears that it is
broken (keep.lua).
"""

from __future__ import annotations

from typing import NamedTuple

from turnmill_worker.claim import TOKEN_LENGTH
from turnmill_worker.engines.base import Progress


class Telling(NamedTuple):
    """News for readers: `text`, from byte `at` of a line on."""

    line: str = ""
    at: int = 0
    text: bytes = b""
    characters: int = 0


NOTHING = Telling()


class Teller:
    """Tells of the answer of one claim. `earlier`: what earlier tries told, behind the name of its line."""

    def __init__(self, token: str, progress: Progress) -> None:
        self.earlier = b""
        self._token, self._progress = token, progress
        self._line = ""  # not known yet
        self._breaks = False
        self._characters = self._bytes = 0  # that Redis has

    @property
    def silent(self) -> bool:
        """Whether nothing of the answer is told yet, but may be."""
        return not self._bytes and self._progress.telling is not None

    def news(self) -> Telling:
        """What is not told yet. Raises UnicodeError, where the text is not one, and what the engine raises."""
        if self._progress.sent is None:
            return NOTHING
        if not self._line:
            self._begin()
        telling = self._progress.telling
        text = telling(self._characters) if telling is not None else ""
        if not text and not self._breaks:
            return NOTHING
        return Telling(self._line, self._bytes, text.encode(), len(text))

    def told(self, news: Telling, count: int) -> None:
        """Redis has `count` bytes of the line now."""
        self._breaks = False
        if count == news.at + len(news.text):
            self._characters += news.characters
            self._bytes = count
        else:  # it has lost something: from the beginning
            self._characters = self._bytes = 0

    def _begin(self) -> None:
        line, text = self.earlier[:TOKEN_LENGTH].decode(), self.earlier[TOKEN_LENGTH:].decode()
        telling = self._progress.telling
        if text and telling is not None and telling(0).startswith(text):
            self._line = line
            self._characters, self._bytes = len(text), len(self.earlier) - TOKEN_LENGTH
        else:
            self._line, self._breaks = self._token, bool(text)
