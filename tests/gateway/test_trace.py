"""Traces of requests: generated, and read from files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from benchmarks.trace import Arrival, generated, read

from turnmill.errors import UsageError


def test_a_generated_trace_has_bursts_and_long_tails() -> None:
    trace = generated(1, 2000, 100.0, longest=4000)
    assert (
        trace == generated(1, 2000, 100.0, longest=4000) != generated(2, 2000, 100.0, longest=4000)
    )
    assert len(trace) == 2000
    assert trace == sorted(trace, key=lambda one: one.at)
    in_a_second = Counter(int(one.at) for one in trace)
    assert max(in_a_second.values()) > 4 * len(trace) / 100
    for lengths in ([one.prompt for one in trace], [one.answer for one in trace]):
        assert 1 <= min(lengths) <= max(lengths) <= 4000
        assert max(lengths) > 5 * sum(lengths) / len(lengths)


def test_traces_are_read_as_they_are_published(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,0\n"
    )
    first, second = read(file)
    assert first == Arrival(0.0, 374, 44)
    assert (round(second.at, 3), second.prompt, second.answer) == (4.315, 396, 1)
    file.write_text("offset_s,in_tokens,out_tokens\n4.315,396,109\n0.000,374,44\n")
    assert read(file) == [Arrival(0.0, 374, 44), Arrival(4.315, 396, 109)]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "first line"),
        ("a,b\n1,2\n", "first line"),
        ("offset_s,in_tokens,out_tokens\n", "no requests"),
        ("offset_s,in_tokens,out_tokens\n0,1,2\n1,x,2\n", "line 3"),
        ("offset_s,in_tokens,out_tokens\n0,1\n", "line 2"),
        ("offset_s,in_tokens,out_tokens\nnan,1,2\n", "line 2"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, what: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(UsageError, match=what):
        read(file)
    with pytest.raises(UsageError, match="No such file"):
        read(tmp_path / "nowhere.csv")
