"""When a server is asked again."""

from __future__ import annotations

import time
from email.utils import formatdate

import pytest

from turnmill_worker.engines.pace import Pace, pause, retry_after


def test_pauses_grow_up_to_a_minute_and_differ() -> None:
    for attempt in range(30):
        whole = min(60.0, 0.5 * 2**attempt)
        pauses = {pause(attempt) for _ in range(20)}
        assert all(whole / 2 <= one <= whole for one in pauses)
        assert len(pauses) > 1


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "2"}, 2.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "0"}, 0.0),
        ({"retry-after-ms": "1500", "retry-after": "2"}, 1.5),
        ({"retry-after": "86400"}, 900.0),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
    ],
)
def test_a_server_s_wish_is_read(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers) == seconds


def test_a_date_is_a_wish_too() -> None:
    seconds = retry_after({"retry-after": formatdate(time.time() + 60, usegmt=True)})
    assert seconds == pytest.approx(60, abs=2)


async def test_nobody_asks_before_the_time() -> None:
    pace = Pace()
    await pace.wait()
    pace.hold(0.05)
    pace.hold(0.01)
    before = time.monotonic()
    await pace.wait()
    assert time.monotonic() - before >= 0.05
