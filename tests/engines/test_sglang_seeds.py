"""Which seeds turns have with SGLang."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from tests.engines.asking import turn

from turnmill_worker.engines.base import InvalidRequest
from turnmill_worker.engines.sglang_seeds import Seeds


def settled(seeds: Seeds, **fields: Any) -> dict[str, Any]:
    sampling = {"sampling_seed": fields.get("seed"), "min_p": fields.get("min_p", 0.0)}
    seeds.settle(turn("Draw", **fields), sampling)
    return sampling


def test_draws_have_seeds_of_their_own_where_seeds_are_used() -> None:
    seeds = Seeds(used=True)
    drawn = [settled(seeds, temperature=1, sample=sample) for sample in (0, 1, 2, 1)]
    first, second, third, again = [each["sampling_seed"] for each in drawn]
    assert len({first, second, third}) == 3
    assert again == second
    assert 0 <= first < 2**63
    assert settled(seeds, temperature=1, seed=7)["sampling_seed"] == 7
    assert settled(seeds, temperature=0)["sampling_seed"] is None


def test_min_p_is_refused_where_the_engine_would_die_of_it() -> None:
    with pytest.raises(InvalidRequest, match="min_p: not with"):
        settled(Seeds(used=True), temperature=1, min_p=0.1)
    assert settled(Seeds(used=False), temperature=1, min_p=0.1)["min_p"] == 0.1


def test_that_seeds_are_not_used_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    seeds = Seeds(used=False)
    assert settled(seeds, temperature=1)["sampling_seed"] is None
    assert not caplog.messages
    assert [settled(seeds, temperature=1, seed=7)["sampling_seed"] for _ in range(2)] == [7, 7]
    assert len(caplog.messages) == 1
    assert "--enable-deterministic-inference" in caplog.text
