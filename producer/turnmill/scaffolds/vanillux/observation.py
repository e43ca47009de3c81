"""What a model sees of a command's output: all of it, or its head and its tail. Memory is bounded while it is read."""

from __future__ import annotations

import codecs


class Observation:
    """Takes output as it comes, and keeps no more than `limit` characters of it, with a mark where others were left out.

    What is no UTF-8 becomes U+FFFD, and so does NUL, at which some tokenizers end.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._head, self._tail, self._count = "", "", 0

    def feed(self, data: bytes, final: bool = False) -> None:
        text = self._decoder.decode(data, final)
        self._count += len(text)
        self._head += text[: self._limit - len(self._head)]
        self._tail = (self._tail + text)[-self._tail_length :]

    @property
    def text(self) -> str:
        if self._count <= self._limit:
            text = self._head
        else:
            left_out = self._count - self._limit
            head, tail = self._head[: self._limit - self._tail_length], self._tail
            text = f"{head}\n[... {left_out} characters left out ...]\n{tail}"
        return text.replace("\0", "\ufffd")

    @property
    def _tail_length(self) -> int:
        return max(1, self._limit // 2)
