"""The public names: exactly those that are exported, and those that docs/library.md explains."""

from __future__ import annotations

import inspect
import re
import types
from pathlib import Path

import pytest

import turnmill
from turnmill import BlockingClient, Client

LIBRARY = (Path(__file__).parents[2] / "docs" / "library.md").read_text()


def section(title: str) -> str:
    return LIBRARY.split(f"## {title}\n")[1].split("\n## ")[0]


def first_cells(text: str) -> list[str]:
    """What stands in backquotes in the first column of the tables."""
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`(\w+)", row)]


def public(of: type) -> list[str]:
    return [name for name, _ in inspect.getmembers(of, callable) if not name.startswith("_")]


def test_they_are_sorted_and_single() -> None:
    assert turnmill.__all__ == sorted(set(turnmill.__all__))


@pytest.mark.parametrize("name", turnmill.__all__)
def test_each_can_be_imported_and_says_what_it_is(name: str) -> None:
    value = getattr(turnmill, name)
    assert value.__doc__
    assert value.__module__.startswith("turnmill.")


def test_nothing_else_is_there() -> None:
    others = {
        name
        for name, value in vars(turnmill).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert others == set(turnmill.__all__)


def test_each_is_documented() -> None:
    assert sorted(first_cells(section("Names"))) == turnmill.__all__


def test_the_calls_of_the_client_are_documented() -> None:
    arguments = list(inspect.signature(Client).parameters)
    documented = first_cells(section("Client"))
    assert documented[: len(arguments)] == arguments
    assert sorted(documented[len(arguments) :]) == public(Client)


def test_the_blocking_client_has_the_same_calls() -> None:
    missing = {"ask_stating", "as_ended", "stream", "submit_stating"}
    assert set(public(Client)) - set(public(BlockingClient)) == missing
    assert set(public(BlockingClient)) <= set(public(Client))
