"""A play for the scripted engine in which it is right: `ground_truth.py IDS PLAY` writes the possible answers of the
multi-turn entries that are named in IDS (as in bfcl's `test_case_ids_to_generate.json`), two calls a step, and a text
at the end of each turn."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

from bfcl_eval.constants.default_prompts import DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC
from bfcl_eval.utils import load_ground_truth_entry, load_test_entries_from_id_file

CALLS_IN_A_STEP = 2


def tool_call(code: str, parameters: dict[str, list[str]]) -> dict[str, Any]:
    """`f(1, b=2)` with its arguments by name. `parameters`: those of each function, in order."""
    call = ast.parse(code, mode="eval").body
    assert isinstance(call, ast.Call)
    name = ast.unparse(call.func)
    values = dict(zip(parameters[name], call.args, strict=False))
    values |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    return {"name": name, "arguments": {key: ast.literal_eval(v) for key, v in values.items()}}


def scenes(entry: dict[str, Any], truth: list[list[str]]) -> list[dict[str, Any]]:
    """The entry, turn by turn. A turn without a question is the one that brings the missing functions."""
    withheld = [doc for docs in entry.get("missed_function", {}).values() for doc in docs]
    parameters = {
        doc["name"]: list(doc["parameters"]["properties"]) for doc in entry["function"] + withheld
    }
    users: list[str] = []
    found: list[dict[str, Any]] = []
    for turn, (question, codes) in enumerate(zip(entry["question"], truth, strict=True)):
        users += [message["content"] for message in question] or [
            DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC
        ]
        calls = [tool_call(code, parameters) for code in codes]
        steps = [calls[i : i + CALLS_IN_A_STEP] for i in range(0, len(calls), CALLS_IN_A_STEP)]
        answers = [{"tool_calls": step} for step in steps]
        found.append({"users": list(users), "answers": [*answers, {"content": f"Turn {turn}."}]})
    return found


def main(ids: Path, play: Path) -> None:
    categories, entries = load_test_entries_from_id_file(ids)
    truths = {
        entry["id"]: entry["ground_truth"]
        for category in categories
        for entry in load_ground_truth_entry(category)
    }
    written = [scene for entry in entries for scene in scenes(entry, truths[entry["id"]])]
    play.write_text("".join(json.dumps(scene) + "\n" for scene in written))


main(Path(sys.argv[1]), Path(sys.argv[2]))
