"""Which parser an answer needs, seen by the marks in the model's chat template: `--tool-call-parser auto` and
`--reasoning-parser auto`, where the engine itself does not know.

The rules are careful. A wrong parser takes text out of answers, unseen; none leaves it in, where it is seen.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

AUTO = "auto"

KINDS = {"tool_call_parser": "tool-call parser", "reasoning_parser": "reasoning parser"}
"""Of parsers: the name that an engine's argument has, and ours."""

log = logging.getLogger("turnmill.engines.parsers")


class Rule(NamedTuple):
    """A template that has all of `marks`, and none of `others`, belongs to models whose answers `parser` reads."""

    parser: str
    marks: tuple[str, ...]
    others: tuple[str, ...] = ()


MISTRAL = ("[TOOL_CALLS]",)
LLAMA3 = ("<|start_header_id|>", '"parameters": dictionary of argument name and its value')
HERMES = ("<tool_call>", "arguments")
"""Calls as JSON, as Hermes and Qwen 2.5 and 3 write them."""
NOT_HERMES = ("<arg_key>", "<function=")


def first_match(template: str, rules: Sequence[Rule]) -> str | None:
    """The parser of the first rule that fits."""
    for parser, marks, others in rules:
        if all(mark in template for mark in marks) and not any(mark in template for mark in others):
            return parser
    return None


def text_of(tokenizer: Any) -> str:
    """The chat template of a tokenizer, or all of them if it has several; nothing, if it has another way."""
    own = getattr(tokenizer, "chat_template", None) or ""
    return own if isinstance(own, str) else "\n".join(own.values())


def say(engine: str, argument: str, found: str | None) -> None:
    """Tell the log what `auto` came to."""
    kind = KINDS[argument]
    if found:
        log.info("%s: %s %s, by the chat template", engine, kind, found)
    else:
        log.warning(
            "%s: no %s is known for this chat template, so there is none: name it by --%s",
            *(engine, kind, argument.replace("_", "-")),
        )
