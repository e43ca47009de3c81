"""Canonical JSON: the fast way gives what RFC 8785's own writer gives."""

from __future__ import annotations

from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from turnmill.canonical import canonical
from turnmill.errors import BadTurn

EXACT = 2**53 - 1

keys = st.sampled_from(("a", "b", "B", "_", "0", "~", "é", "\ue000", "\U0001f600")) | st.text(
    max_size=3
)
texts = st.text(max_size=8) | st.sampled_from(("\x00\x1f\x7f\u2028", '\b\f\n\r\t"\\/'))
floats = st.floats(allow_nan=False, allow_infinity=False)
numbers = (
    st.integers(-EXACT, EXACT)
    | floats.filter(lambda number: abs(number) < EXACT or abs(number) >= 1e21)
    | st.sampled_from((0.0, -0.0, 1.0, 0.7, 1e-4, 9.9e-5, 1e-7, 1e15, 123456789012345.5, 1e21))
)
values = st.recursive(
    st.none() | st.booleans() | texts | numbers,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(keys, values, max_size=4))
def test_both_forms_are_rfc_8785(value: dict[str, Any]) -> None:
    stored, hashed = canonical(value)
    assert stored == hashed == rfc8785.dumps(value)


@pytest.mark.parametrize("number", [2**53, -(2**53), 10**30])
def test_a_larger_integer_is_stored_as_it_is_and_hashed_with_a_tag(number: int) -> None:
    forms = canonical({"b": 1.0, "a": number})
    assert forms.stored == b'{"a":%d,"b":1.0}' % number
    assert forms.hashed == b'{"a":{"$int":"%d"},"b":1}' % number


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800", {1: 2}, object()])
def test_what_is_no_json_is_refused(value: Any) -> None:
    with pytest.raises(BadTurn, match="no canonical JSON"):
        canonical({"value": value})
    with pytest.raises(BadTurn, match="no canonical JSON"):
        canonical({"value": value, "large": 2**60})
