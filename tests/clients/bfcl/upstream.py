"""The messages and tools of every turn of every entry, beside those that the benchmark's own functions make."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

# What the module of these functions imports for others of its functions.
for name in ("filelock", "tenacity", "tree_sitter", "tree_sitter_java", "tree_sitter_javascript"):
    sys.modules[name] = MagicMock()

from bfcl_eval.constants.default_prompts import DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC  # noqa: E402
from bfcl_eval.constants.enums import ModelStyle  # noqa: E402
from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI  # noqa: E402
from bfcl_eval.model_handler.utils import convert_to_tool  # noqa: E402
from bfcl_eval.utils import load_dataset_entry  # noqa: E402

from turnmill.scaffolds.bfcl.entries import CATEGORIES, read  # noqa: E402


def turns(entry: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """As the loop of the benchmark's handler for OpenAI's API goes through them."""
    offered, held_out = entry["function"], entry.get("missed_function", {})
    for index, said in enumerate(entry["question"]):
        if str(index) in held_out:
            offered.extend(held_out[str(index)])
            said = [{"role": "user", "content": DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC}]
        yield said, convert_to_tool(offered, GORILLA_TO_OPENAPI, ModelStyle.OPENAI_COMPLETIONS)


count = 0
for category in CATEGORIES:
    theirs = load_dataset_entry(f"multi_turn_{category}")
    for entry, mine in zip(theirs, read(category).items, strict=True):
        assert entry["id"] == mine.id
        pairs = zip(turns(entry), mine.turns(), strict=True)
        for (said, tools), (my_messages, my_tools) in pairs:
            assert said == [one.model_dump(exclude_none=True) for one in my_messages], mine.id
            assert tools == [one.model_dump(exclude_none=True) for one in my_tools], mine.id
            count += 1
print(count)
