"""The benchmark's entries, and the functions that each offers."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from typing import Any

from bfcl_eval.constants.default_prompts import DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC
from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING
from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI

from turnmill.errors import BadInput, UsageError
from turnmill.lines import Loaded
from turnmill.turn import Message, Tool

CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
_HINT = " Note that the provided function is in Python 3 syntax."
"""The benchmark says this of the functions that are offered from the start, and not of those that come later."""
_DATA = files("bfcl_eval").joinpath("data")


@dataclass(frozen=True)
class Entry:
    """A conversation of the benchmark. `fields`: its line of the benchmark's data. `truth`: for each turn, the calls that
    are right. `functions`: what is offered from the start; `held_out`: what is offered from a turn on only."""

    id: str
    fields: Mapping[str, Any] = field(hash=False)
    truth: list[list[str]] = field(hash=False)
    functions: list[dict[str, Any]] = field(hash=False)
    held_out: Mapping[int, list[dict[str, Any]]] = field(hash=False)

    @cached_property
    def digest(self) -> str:
        """64 hex digits, over all that is asked and how it is scored."""
        known = [self.fields, self.truth, self.functions, sorted(self.held_out.items())]
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()

    @property
    def long_context(self) -> bool:
        return "long_context" in self.id

    def turns(self) -> Iterator[tuple[list[Message], list[Tool]]]:
        """For each turn, what is said, and the tools from there on. A turn that only brings functions says so, in the
        benchmark's words."""
        offered = list(self.functions)
        for index, said in enumerate(self.fields["question"]):
            offered += self.held_out.get(index, [])
            messages = [Message.model_validate(message) for message in said]
            if index in self.held_out:
                text = DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC
                messages = [Message(role="user", content=text)]
            yield messages, [tool_of(function) for function in offered]


def read(source: str, skip_bad: bool = False) -> Loaded[Entry]:
    """Entries of categories, with commas between, or of `all`. Raises UsageError for another name, BadInput for a wheel
    without the data."""
    names = CATEGORIES if source == "all" else tuple(source.split(","))
    for name in names:
        if name not in CATEGORIES:
            known = ", ".join(CATEGORIES)
            raise UsageError(f"there is no multi-turn category {name!r}: {known}, or all")
    return Loaded([entry for name in dict.fromkeys(names) for entry in _category(name)], [])


def _category(name: str) -> Iterator[Entry]:
    file = f"BFCL_v4_multi_turn_{name}.json"
    entries, answers = _lines(file), _lines(f"possible_answer/{file}")
    if [entry["id"] for entry in entries] != [answer["id"] for answer in answers]:
        raise BadInput(file, 0, "its entries are not those of the possible answers")
    documents: dict[str, list[dict[str, Any]]] = {}
    for entry, answer in zip(entries, answers, strict=True):
        functions = []
        for of_class in entry["involved_classes"]:
            if of_class not in documents:
                path = MULTI_TURN_FUNC_DOC_FILE_MAPPING[of_class]
                documents[of_class] = _lines(f"multi_turn_func_doc/{path}")
            functions += documents[of_class]
        held_out = {
            int(turn): [_named(functions, missed) for missed in names]
            for turn, names in entry.get("missed_function", {}).items()
        }
        missing = [function["name"] for held in held_out.values() for function in held]
        offered = [
            {**function, "description": function["description"] + _HINT}
            for function in functions
            if function["name"] not in missing
        ]
        yield Entry(entry["id"], entry, answer["ground_truth"], offered, held_out)


def _lines(path: str) -> list[dict[str, Any]]:
    try:
        text = _DATA.joinpath(path).read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]
    except (OSError, ValueError) as error:
        raise BadInput(path, 0, f"of the wheel bfcl-eval, cannot be read: {error}") from None


def _named(functions: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(function for function in functions if function["name"] == name)


def tool_of(function: Mapping[str, Any]) -> Tool:
    """A function as the benchmark's own handler for OpenAI's API offers it."""
    offered = copy.deepcopy(dict(function))
    parameters = offered["parameters"]
    parameters["type"] = "object"
    for value in parameters["properties"].values():
        _as_schema(value)
    return Tool(function=offered)


def _as_schema(value: dict[str, Any]) -> None:
    """The benchmark's type names to those of JSON Schema, as far down as its own handler goes."""
    given = value.get("type", "string")
    if given == "float":
        value["format"] = "float"
        value["description"] = value.get("description", "") + " This is a float type value."
    value["type"] = GORILLA_TO_OPENAPI.get(given, "string")
    if value["type"] not in ("array", "object"):
        return
    if "properties" in value:
        for inner in value["properties"].values():
            _as_schema(inner)
    elif "items" in value:
        items = value["items"]
        items["type"] = GORILLA_TO_OPENAPI[items["type"]]
        if items["type"] == "array" and "items" in items:
            items["items"]["type"] = GORILLA_TO_OPENAPI[items["items"]["type"]]
        elif items["type"] == "object" and "properties" in items:
            for inner in items["properties"].values():
                _as_schema(inner)
