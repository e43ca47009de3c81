"""Scaffolds by name: turnmill's own, entry points of the group `turnmill.scaffolds`, or `module:attribute`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import ValidationError, validate_call

from turnmill.errors import UsageError
from turnmill.scaffolds.base import Scaffold
from turnmill.turn import explain

GROUP = "turnmill.scaffolds"
OWN = {
    "bfcl_multi_turn": "turnmill.scaffolds.bfcl.multi_turn:bfcl_multi_turn",
    "multi_turn_chat": "turnmill.scaffolds.multi_turn_chat:multi_turn_chat",
    "stirrup": "turnmill.scaffolds.stirrup:stirrup",
    "vanillux": "turnmill.scaffolds.vanillux:vanillux",
}


def names() -> list[str]:
    """Of all scaffolds that are installed."""
    return sorted({*OWN, *(point.name for point in entry_points(group=GROUP))})


def find(name: str, options: Mapping[str, str]) -> Scaffold[Any]:
    """The scaffold of this name, which leads to a Scaffold, or to a function that makes one: its keyword
    arguments are the scaffold's options. Raises UsageError for a name that is unknown or cannot be imported, and
    for options that the scaffold does not take."""
    point = _point(name)
    try:
        found = point.load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"scaffold {name!r} cannot be imported: {error}") from error
    if isinstance(found, Scaffold):
        if options:
            raise UsageError(f"scaffold {name!r} takes no options")
        return found
    if not callable(found):
        raise UsageError(f"scaffold {name!r}: {point.value} is neither a Scaffold nor makes one")
    known = list(inspect.signature(found).parameters)
    for option in options:
        if option not in known:
            there = ", ".join(known) or "none"
            raise UsageError(f"scaffold {name!r} has no option {option!r}; it has {there}")
    try:
        made = validate_call(found)(**options)
    except ValidationError as error:
        raise UsageError(f"scaffold {name!r}: {explain(error)}") from None
    if not isinstance(made, Scaffold):
        raise UsageError(f"scaffold {name!r}: {point.value} returned {type(made).__name__}")
    return made


def takes(name: str, option: str) -> bool:
    """Whether the scaffold of this name has such an option. What cannot be found or imported is said by `find`."""
    try:
        found = _point(name).load()
    except (ImportError, AttributeError):
        return True
    if isinstance(found, Scaffold) or not callable(found):
        return False
    return option in inspect.signature(found).parameters


def _point(name: str) -> EntryPoint:
    if value := name if ":" in name else OWN.get(name):
        return EntryPoint(name, value, GROUP)
    points = list(entry_points(group=GROUP, name=name))
    if not points:
        raise UsageError(
            f"scaffold {name!r} is unknown; there are {', '.join(names())}, or MODULE:ATTRIBUTE"
        )
    if len({point.value for point in points}) > 1:
        raise UsageError(f"scaffold {name!r}: several packages have one of this name")
    return points[0]
