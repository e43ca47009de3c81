"""Telling draws apart.

A turn that is neither greedy nor seeded is a draw from a distribution, and merging draws falsifies
scores. Each gets a sample number from what it is in its run, so that a resumed run finds its own draws
and never another's.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import Counter
from copy import copy

from turnmill.turn import Turn

_SAMPLE_BYTES = 6
"""48 bits: within the integers that JSON carries exactly."""
_SEED_BITS = 31
"""What engines take as a seed is a signed 32-bit integer at the least."""


class Draws:
    """The draws of one conversation of a run, in one epoch. `run`: whose draws they are; empty, if runs share
    them. `seed`: the run's, if it has one."""

    def __init__(self, run: str, conversation: str, epoch: int, seed: int | None) -> None:
        self._origin: tuple[str | int, ...] = (run, conversation, epoch)
        self._seed = seed
        self._asked: Counter[str] = Counter()

    def within(self, effect: str) -> Draws:
        """The draws of what an effect asks, which are not counted among these: told of the effect, a later attempt does
        not ask it."""
        inner = copy(self)
        inner._origin, inner._asked = (*self._origin, effect), Counter()
        return inner

    def numbered(self, turn: Turn) -> Turn:
        """The turn as it is to be asked: with its sample number, and its own seed if the run has one. A
        turn that all may share stays as it is."""
        if turn.shared:
            return turn
        count = self._asked[turn.hash]
        self._asked[turn.hash] += 1
        sample = _number(_SAMPLE_BYTES * 8, *self._origin, count)
        sampling = turn.sampling
        if self._seed is not None:
            seed = _number(_SEED_BITS, self._seed, sample)
            sampling = sampling.model_copy(update={"seed": seed})
        return turn.model_copy(update={"sample": sample, "sampling": sampling})


def nth_draw(run: str, count: int) -> int:
    """The sample number of a run's draw of a turn that `count` were drawn of before, where a run is not made of
    conversations that we know."""
    return _number(_SAMPLE_BYTES * 8, run, count)


def any_draw() -> int:
    """A sample number that nobody else has."""
    return secrets.randbits(_SAMPLE_BYTES * 8)


def _number(bits: int, *parts: str | int) -> int:
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return int.from_bytes(digest[:8]) >> (64 - bits)
