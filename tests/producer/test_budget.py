"""How many conversations may fail."""

from __future__ import annotations

import pytest

from turnmill.budget import JUDGED_FROM, FailureBudget
from turnmill.errors import UsageError


@pytest.mark.parametrize(
    ("text", "failed", "ended", "spent"),
    [
        ("5%", 1, 20, False),
        ("5%", 2, 20, True),
        ("5%", 5, 100, False),
        ("5%", 6, 100, True),
        ("5%", JUDGED_FROM - 1, JUDGED_FROM - 1, False),
        ("5%", JUDGED_FROM, JUDGED_FROM, True),
        ("0%", 1, 20, True),
        ("0%", 0, 20, False),
        ("100%", 1000, 1000, False),
        ("0.5%", 1, 100, True),
        ("0.5%", 1, 200, False),
        ("0", 0, 1, False),
        ("0", 1, 1, True),
        ("3", 3, 3, False),
        ("3", 4, 1000, True),
    ],
)
def test_the_budget(text: str, failed: int, ended: int, spent: bool) -> None:
    assert FailureBudget.parse(text).spent(failed, ended) is spent


@pytest.mark.parametrize(
    "text",
    ["", "%", "five", "-1", "-1%", "101%", "1.5", "nan", "nan%", "inf%", "5 %%", "1e9%", "9" * 400],
)
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="max-failures"):
        FailureBudget.parse(text)


@pytest.mark.parametrize("text", ["5%", "10", "0", "0%", "0.5%"])
def test_a_budget_is_shown_as_it_was_given(text: str) -> None:
    assert str(FailureBudget.parse(text)) == text
