"""The benchmark's own answers as a play of the scripted engine: `ground_truth.py CATEGORY FILE`. All calls of a turn
are one step."""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING

from turnmill.scaffolds.bfcl.entries import Entry, read


def scenes(entry: Entry) -> Iterator[dict[str, Any]]:
    users: list[Any] = []
    for (said, _), truth in zip(entry.turns(), entry.truth, strict=True):
        users += [message.content for message in said if message.role == "user"]
        calls = [call_of(entry, call) for call in truth]
        answers: list[dict[str, Any]] = [{"tool_calls": calls}] if calls else []
        yield {"users": list(users), "answers": [*answers, {"content": "Done."}]}


def call_of(entry: Entry, text: str) -> dict[str, Any]:
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    arguments = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    if call.args:
        names = parameters(entry, call.func.id)
        arguments |= dict(zip(names, map(ast.literal_eval, call.args), strict=False))
    return {"name": call.func.id, "arguments": arguments}


def parameters(entry: Entry, name: str) -> list[str]:
    for of_class in entry.fields["involved_classes"]:
        found = getattr(import_module(CLASS_FILE_PATH_MAPPING[of_class]), of_class)
        if method := getattr(found, name, None):
            return list(inspect.signature(method).parameters)[1:]
    raise ValueError(f"{entry.id}: no method {name}")


if __name__ == "__main__":
    lines = [json.dumps(scene) for entry in read(sys.argv[1]).items for scene in scenes(entry)]
    Path(sys.argv[2]).write_text("\n".join(lines))
