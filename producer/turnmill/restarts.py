"""Starting a process again that has ended."""

from __future__ import annotations

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0
LIVED = 60.0
"""Seconds. Who lived so long did start well: the next pause is a short one again."""


class Pauses:
    """How long to wait before each start: ever longer while the process ends soon. In seconds."""

    def __init__(self) -> None:
        self._next = FIRST_PAUSE

    def after(self, lived: float) -> float:
        """The pause that is due now that the process has ended, `lived` seconds after it was started."""
        pause = FIRST_PAUSE if lived >= LIVED else self._next
        self._next = min(2 * pause, LONGEST_PAUSE)
        return pause


def how_it_ended(code: int) -> str:
    """`code`: as subprocess gives it, below 0 for a signal."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"
