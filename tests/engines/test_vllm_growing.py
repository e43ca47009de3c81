"""What is kept and told of vLLM's growing answers, without vLLM: outputs as it gives them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from turnmill_worker.engines.tokens import KeptToken, unpack_tokens
from turnmill_worker.engines.vllm_growing import Grown

TEXTS = [
    "The ",
    "mil",
    "ler",
    " went to",
    " the",
    " riv",
    "er",
    " and",
    " did",
    " not come",
    " home.",
]


def test_what_is_told_is_the_text_of_what_is_kept() -> None:
    """While vLLM holds back what may be a stop string, it has given more tokens than text."""
    held = 4
    grown = Grown(["stops"], 0)
    since = grown.telling((), lambda _: False)
    given, seen = 0, 0
    for count in range(1, len(TEXTS) + 1):
        text = "".join(TEXTS[:count])
        upto = max(given, len(text) - held)
        grown.take(SimpleNamespace(token_ids=[count - 1], text=text[given:upto], logprobs=None))
        given = upto
        ids = [token.id for token in unpack_tokens(grown.part(0).data)] if since(0) else []
        assert since(0) == "".join(TEXTS[id] for id in ids)
        seen = max(seen, len(ids))
    assert seen >= len(TEXTS) - 2


@pytest.mark.parametrize(
    ("entries", "top"),
    [
        pytest.param({7: -0.5, 3: -2.0}, ((-0.5, 7), (-2.0, 3)), id="among the likeliest"),
        pytest.param({7: -9.0, 3: -1.0, 4: -2.0}, ((-1.0, 3), (-2.0, 4)), id="unlikely"),
    ],
)
def test_log_probabilities_are_kept_in_rows_of_one_width(
    entries: dict[int, float], top: tuple[Any, ...]
) -> None:
    grown = Grown([], 2)
    logprobs = [{id: SimpleNamespace(logprob=value) for id, value in entries.items()}]
    grown.take(SimpleNamespace(token_ids=[7], text="x", logprobs=logprobs))
    assert unpack_tokens(grown.part(0).data) == [KeptToken(7, entries[7], top)]
