"""How many conversations of a run may fail."""

from __future__ import annotations

from dataclasses import dataclass

from turnmill.errors import UsageError

JUDGED_FROM = 20
"""Conversations that have ended before a share says anything."""


@dataclass(frozen=True)
class FailureBudget:
    """`limit` failed conversations, or with `share` that part of those that have ended (0 to 1)."""

    limit: float
    share: bool

    @classmethod
    def parse(cls, text: str) -> FailureBudget:
        """`10` or `5%`. Raises UsageError."""
        share = text.endswith("%")
        try:
            value = float(text[:-1]) / 100 if share else float(int(text))
        except (ValueError, OverflowError):
            value = -1.0
        if not value >= 0 or (share and value > 1):
            raise UsageError(
                f"max-failures {text!r}: a number of conversations, or a share like 5%"
            )
        return cls(value, share)

    def spent(self, failed: int, ended: int) -> bool:
        """Whether a run with so many failed and ended conversations has to stop."""
        if self.share:
            return ended >= JUDGED_FROM and failed > self.limit * ended
        return failed > self.limit

    def __str__(self) -> str:
        return f"{self.limit * 100:g}%" if self.share else f"{self.limit:.0f}"
