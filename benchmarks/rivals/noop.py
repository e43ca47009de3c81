"""The no-op work that every queue is given, and the command line of every rival's script. Runs in any
environment: it needs the standard library alone."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

TEXT = "mill" * 214
"""One word: a no-op is not to measure how fast the scripted engine counts words."""


def dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def body(number: int) -> dict[str, Any]:
    """About 1 kB as JSON: a turn as it is stored."""
    return {
        "messages": [
            {"content": TEXT, "role": "system"},
            {"content": f"Turn {number}.", "role": "user"},
        ],
        "model": "sim",
        "sampling": {"temperature": 0.0},
        "v": 1,
    }


def answered(turn: dict[str, Any]) -> dict[str, Any]:
    """A reply and a trace of the sizes that are stored for a turn. `finished`: Unix time, in seconds."""
    now = time.time()
    return {
        "reply": {
            "message": {"role": "assistant", "content": turn["messages"][-1]["content"]},
            "finish_reason": "stop",
            "usage": {"prompt_tokens": 195, "completion_tokens": 2, "cached_tokens": 0},
        },
        "trace": {
            "worker": "a-worker",
            "outcome": "completed",
            "engine": {"engine": "sim", "version": "0.1.0", "model": "sim", "dtype": "words"},
            "request": {
                "endpoint": "sim.answer",
                "prompt_tokens": 195,
                "prompt_digest": "0" * 64,
                "sampling": {"temperature": 0.0, "max_tokens": 7997},
            },
            "times": {name: now for name in ("claimed", "rendered", "sent", "finished")},
        },
    }


def command_line(**commands: Callable[[str, int], None]) -> None:
    """`SCRIPT COMMAND SOCKET NUMBER`: `fill` puts NUMBER jobs into the queue of the server on SOCKET, `work` is a
    stock worker with NUMBER jobs at once, until it is ended."""
    command, path, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
    logging.basicConfig(level=logging.WARNING)
    commands[command](path, number)
