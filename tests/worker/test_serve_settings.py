"""How a worker behaves, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from turnmill.errors import UsageError
from turnmill_worker.claim import TOKEN_LENGTH, Claim, Company, read_claims
from turnmill_worker.settings import WorkerSettings


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lease": 0}, "lease: must be a number above 0"),
        ({"lease": float("nan")}, "lease: must be a number above 0"),
        ({"lease": -1}, "lease: must be a number above 0"),
        ({"lease": 0.0004}, "lease 0.0004: from 0.1 to 3600 s"),
        ({"lease": 1e300}, "lease 1e"),
        ({"stalled_after": 0}, "stalled_after: must be a number above 0"),
        ({"unstored": 0}, "unstored: must be a number above 0"),
        ({"drain": -1}, "drain: must be a number, not below 0"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        WorkerSettings(**options)


def test_no_time_to_drain_is_a_setting() -> None:
    assert WorkerSettings(drain=0).drain == 0


def test_request_ids_have_one_length_and_are_new_for_each_claim() -> None:
    def claim(token: str) -> Claim:
        return Claim("h" * 64, token, Company.ANY, 0.0, b"")

    first, second = claim("a" * TOKEN_LENGTH), claim("b" * TOKEN_LENGTH)
    assert len(first.rid) == len(second.rid) == 88
    assert first.rid != second.rid


def test_an_empty_claim_is_no_turn() -> None:
    assert read_claims("t", [0, 0]) == []
