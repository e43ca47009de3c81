"""Tokens as they are kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnmill_worker.engines.tokens import KeptToken, pack_tokens, unpack_tokens

IDS = st.integers(0, 2**32 - 1)
LOGPROBS = st.floats(max_value=0, allow_nan=False)


@st.composite
def answers(draw: st.DrawFn) -> list[KeptToken]:
    logprobs = draw(st.booleans())
    width = draw(st.integers(0, 3)) if logprobs else 0
    return [
        KeptToken(
            draw(IDS),
            draw(LOGPROBS) if logprobs else None,
            tuple((draw(LOGPROBS), draw(IDS)) for _ in range(width)),
        )
        for _ in range(draw(st.integers(1, 5)))
    ]


@given(answers())
def test_tokens_come_back_as_they_were(tokens: list[KeptToken]) -> None:
    assert unpack_tokens(pack_tokens(tokens)) == tokens


def test_ids_alone_take_four_bytes() -> None:
    assert len(pack_tokens([KeptToken(id) for id in range(100)])) == 2 + 400


def test_tokens_of_two_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="different"):
        pack_tokens([KeptToken(1), KeptToken(2, -0.5)])


def test_a_damaged_part_is_refused() -> None:
    packed = pack_tokens([KeptToken(1, -0.5)])
    for damaged in (b"", packed[:-1]):
        with pytest.raises(ValueError, match="damaged"):
            unpack_tokens(damaged)
