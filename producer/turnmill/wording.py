"""Pydantic's errors about what people write, in our words."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Final

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from turnmill.turn import MOST_EXPLAINED, Sampling, explain

_SHOWN: Final = 3
_WORDS: Final = {
    "extra_forbidden": "unknown key",
    "list_type": "must be a list",
    "missing": "is missing",
    "model_type": "must be an object",
    "string_type": "must be a string",
    "too_short": "must have at least one",
}


def problems(
    error: ValidationError, of: type[BaseModel], called: Mapping[str, str] | None = None
) -> str:
    """The first problems, in a line: which field, and what about it. `of`: what was to be read. `called`: fields that
    have another name where they were read."""
    count = error.error_count()
    if count > MOST_EXPLAINED:
        return explain(error)
    items = error.errors(include_url=False, include_input=False)
    texts = [problem(item, of, called) for item in items[:_SHOWN]]
    if count > _SHOWN:
        texts.append(f"and {count - _SHOWN} more")
    return "; ".join(texts)


def problem(
    item: ErrorDetails, of: type[BaseModel], called: Mapping[str, str] | None = None
) -> str:
    """One problem: which field, and what about it; for an unknown one, which could be meant."""
    where = ".".join(str(step) for step in item["loc"])
    where = (called or {}).get(where, where)
    text = _WORDS.get(item["type"], item["msg"])
    if item["type"] == "extra_forbidden":
        known = Sampling.model_fields if item["loc"][0] == "sampling" else of.model_fields
        if close := get_close_matches(str(item["loc"][-1]), known, n=1):
            text = f"{text}, did you mean {close[0]}?"
    return f"{where}: {text}"
