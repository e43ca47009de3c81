"""When requests arrive, and how long they and their answers are: generated, or read from a file."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from turnmill.errors import UsageError

BURST_SHARE = 0.5
"""Of all requests; the others come at random moments, independent of each other."""
BURST_SECONDS = 0.05
"""The mean time from the start of a burst to one of its requests."""
COLUMNS = (
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    ("offset_s", "in_tokens", "out_tokens"),
)
"""Moment, prompt and answer: as Azure publishes its traces, and with the seconds since the first request."""


@dataclass(frozen=True)
class Arrival:
    """One request. `at`: seconds after the trace has begun. `prompt`, `answer`: tokens, at least one."""

    at: float
    prompt: int
    answer: int


def generated(seed: int, count: int, seconds: float, *, longest: int) -> list[Arrival]:
    """A trace of so many requests: bursts, whose sizes have a long tail, over a Poisson base; so have the lengths, of
    which none is above `longest`. The same seed gives the same trace."""
    chance = random.Random(seed)

    def length(median: int, spread: float) -> int:
        return max(1, min(longest, round(chance.lognormvariate(math.log(median), spread))))

    times: list[float] = []
    while len(times) < BURST_SHARE * count:
        start, size = chance.uniform(0, seconds), round(3 * chance.paretovariate(1.2))
        size = min(size, count // 4)
        times += [start + chance.expovariate(1 / BURST_SECONDS) for _ in range(size)]
    times = times[:count]
    times += [chance.uniform(0, seconds) for _ in range(count - len(times))]
    return [Arrival(at, length(300, 1.0), length(100, 0.8)) for at in sorted(times)]


def read(path: Path) -> list[Arrival]:
    """A trace in a CSV file with one of the COLUMNS. Raises UsageError, which says where it is wrong."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            names = next((c for c in COLUMNS if set(c) <= set(rows.fieldnames or ())), None)
            if names is None:
                known = " or ".join(",".join(columns) for columns in COLUMNS)
                raise UsageError(f"{path}: its first line must name the columns {known}")
            found = [_arrival(row, names, f"{path}, line {rows.line_num}") for row in rows]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not found:
        raise UsageError(f"{path}: there are no requests in it")
    first = min(one.at for one in found)
    shifted = [Arrival(one.at - first, one.prompt, one.answer) for one in found]
    return sorted(shifted, key=lambda one: one.at)


def _arrival(row: Mapping[str, str | None], names: tuple[str, str, str], where: str) -> Arrival:
    moment, prompt, answer = (row.get(name) or "" for name in names)
    try:
        at = datetime.fromisoformat(moment).timestamp() if ":" in moment else float(moment)
        if not math.isfinite(at):
            raise ValueError(f"{moment} is no time")
        # An answer of no tokens cannot be asked for.
        return Arrival(at, max(1, int(prompt)), max(1, int(answer)))
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
