"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "bad"]


@dataclass(frozen=True)
class Check:
    """`bad`: turns cannot be answered, or may be lost without a word. `advice`: one line on what to do, where
    the state is not ok."""

    name: str
    state: State
    says: str
    advice: str = ""


def size(count: float) -> str:
    """Bytes, as people say them."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def some(names: list[str], most: int = 5) -> str:
    """A list of names, cut short."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
