"""Rounds that take turns, and what is said of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Measured = TypeVar("Measured")

ROUNDS = 7


@dataclass(frozen=True)
class Spread:
    """One figure over all rounds."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(tuple(values))

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def over(self, other: Spread) -> Spread:
        """The ratio, round by round: what disturbs a round disturbs both."""
        return Spread(tuple(a / b for a, b in zip(self.values, other.values, strict=True)))

    def to_json(self) -> dict[str, object]:
        return {
            "median": _rounded(self.median),
            "min": _rounded(self.low),
            "max": _rounded(self.high),
            "rounds": [_rounded(value) for value in self.values],
        }


def interleaved(
    contenders: Mapping[str, Callable[[], Measured]], rounds: int, say: Callable[[str], None]
) -> dict[str, list[Measured]]:
    """Every contender once a round; who begins changes from round to round."""
    results: dict[str, list[Measured]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in sorted(contenders, reverse=number % 2 == 1):
            say(f"round {number + 1} of {rounds}: {name}")
            results[name].append(contenders[name]())
    return results


def rate(times: Sequence[float]) -> float:
    """Endings a second, from the first to the last, by the times at which each ended (seconds). What ended
    together with the first took its time before, and is not counted."""
    first, last = min(times), max(times)
    return sum(time > first for time in times) / (last - first)


def slope(times: Sequence[float]) -> float:
    """Endings a second in the middle of a longer run, as the slope of the least-squares line through the
    count of what has ended: endings that come in bursts, cut anywhere, do not bend it."""
    ordered = sorted(times)
    return statistics.linear_regression(ordered, range(len(ordered))).slope


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
