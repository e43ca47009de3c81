"""When to ask a server again: longer and longer pauses, none alike, and never before the time that it names."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

_FIRST, _LONGEST = 0.5, 60.0
"""Seconds."""
_LONGEST_ASKED = 900.0
"""Seconds; a server that asks for more is asked again then all the same."""


def pause(attempt: int) -> float:
    """Seconds before the next attempt, after `attempt` (from 0) has failed: between half and all of a time that
    doubles. A random half, so that turns that failed together do not come back together."""
    whole: float = min(_LONGEST, _FIRST * 2 ** min(attempt, 20))
    return whole * random.uniform(0.5, 1)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """The seconds that a response asks for: `retry-after-ms`, or `Retry-After` as seconds or as a date. None if it
    asks for nothing that can be read."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        text = headers.get(name, "").strip()
        try:
            seconds = float(text) * unit
        except ValueError:
            continue
        return min(seconds, _LONGEST_ASKED) if seconds >= 0 else None
    try:
        seconds = parsedate_to_datetime(headers.get("retry-after", "")).timestamp() - time.time()
    except (ValueError, TypeError):
        return None
    return min(max(0.0, seconds), _LONGEST_ASKED)


class Pace:
    """One server's wish to be left alone, which is about all that is asked of it, not of one turn."""

    def __init__(self) -> None:
        self._not_before = 0.0

    def hold(self, seconds: float) -> None:
        """Nobody asks before so many seconds have passed."""
        self._not_before = max(self._not_before, time.monotonic() + seconds)

    async def wait(self) -> None:
        """Until asking is allowed; not all in the same moment."""
        while True:
            left = self._not_before - time.monotonic()
            if left <= 0:
                return
            await asyncio.sleep(left + random.uniform(0, min(1.0, left / 2)))
