"""The parser of an engine's own arguments: everything after `--` on the worker's command line."""

from __future__ import annotations

import argparse
import os
from typing import NoReturn

from turnmill.errors import UsageError


class EngineArguments(argparse.ArgumentParser):
    """An argparse parser whose errors are UsageErrors of one line, instead of an exit."""

    def __init__(self, engine: str) -> None:
        super().__init__(prog=f"engine {engine}", allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")


def count(text: str) -> int:
    """An argparse type: a whole number from 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


def amount(text: str) -> float:
    """An argparse type: a finite number from 0."""
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number of 0 or more")
    return number


def check_path(option: str, path: str | None) -> None:
    """Raises UsageError for a model, or an adapter, that is written as a path, and is not there: engines take it for a name on
    the hub then, complain of its letters, or die of it. `option`: where it was given."""
    if path and path.startswith((".", "/")) and not os.path.exists(path):
        raise UsageError(f"{option} {path}: there is no such file or folder")


def first_line(error: BaseException) -> str:
    """What an engine's exception says, in one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def last_line(text: str) -> str:
    """The last line of what an engine's parser printed: what comes before is its usage."""
    return (text.strip().splitlines() or [""])[-1]
