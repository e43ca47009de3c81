"""`auto` in the place of a parser's name: SGLang sees by the chat template what it needs. Of tool calls it does not know the
oldest and most common kinds, which are added here. Of reasoning nothing could be added: its scheduler knows by now."""

from __future__ import annotations

from typing import Any

from turnmill_worker.engines.template_marks import (
    AUTO,
    HERMES,
    KINDS,
    LLAMA3,
    MISTRAL,
    NOT_HERMES,
    Rule,
    first_match,
    say,
    text_of,
)

RULES = (
    Rule("mistral", MISTRAL),
    Rule("llama3", LLAMA3),
    Rule("qwen", HERMES, NOT_HERMES),
)


def complete_parsers(asked: Any, manager: Any) -> None:
    """Choose a tool-call parser where `auto` was asked for and SGLang found none; and tell the log what `auto` came to.
    `asked`: SGLang's arguments as they were given. `manager`: its tokenizer manager, before a chat layer is on it."""
    for argument in KINDS:
        if getattr(asked, argument) != AUTO:
            continue
        found = manager.config_value(argument)
        if found is None and argument == "tool_call_parser":
            found = first_match(text_of(manager.tokenizer), RULES)
            if found:
                manager.record_config_updates("turnmill", tool_call_parser=found)
        say("sglang", argument, found)
