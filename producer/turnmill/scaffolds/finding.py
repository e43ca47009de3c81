"""Scaffolds by name: turnmill's own, entry points of the group `turnmill.scaffolds`, or `module:attribute`."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
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
    found = _load(point)
    if isinstance(found, Scaffold):
        if options:
            raise UsageError(f"scaffold {name!r} takes no options")
        return found
    if not callable(found):
        raise UsageError(f"scaffold {name!r}: {point.value} is neither a Scaffold nor makes one")
    known = _options(found)
    for option in options:
        if option not in known:
            there = ", ".join(known) or "none"
            raise UsageError(f"scaffold {name!r} has no option {option!r}; it has {there}")
    try:
        made = validate_call(found)(**options)
    except ValidationError as error:
        raise UsageError(f"scaffold {name!r}: {explain(error)}") from None
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"scaffold {name!r}: {in_a_line(error)}") from error
    if not isinstance(made, Scaffold):
        raise UsageError(f"scaffold {name!r}: {point.value} returned {type(made).__name__}")
    return made


def takes(name: str, option: str) -> bool:
    """Whether the scaffold of this name has such an option. What cannot be found or imported is said by `find`."""
    try:
        found = _load(_point(name))
    except UsageError:
        return True
    if isinstance(found, Scaffold) or not callable(found):
        return False
    return option in _options(found)


def in_a_line(error: BaseException) -> str:
    """An error in anybody's code: what it is, and where."""
    kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
    text = " ".join(f"{kind}{error}".split())
    ours = {__file__, inspect.__file__}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if not (
            frame.filename in ours or frame.filename.startswith("<") or "importlib" in path.parts
        ):
            return f"{text} ({path.name}:{frame.lineno})"
    return text


def _load(point: EntryPoint) -> Any:
    """Raises UsageError for what cannot be imported."""
    # A module of the working directory, as `python -m` has it; last, so that it hides nothing that is installed.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"scaffold {point.name!r} cannot be imported: {in_a_line(error)}"
        ) from error


def _options(found: Any) -> list[str]:
    try:
        return list(inspect.signature(found).parameters)
    except ValueError:  # some of Python's own have none
        return []


def _point(name: str) -> EntryPoint:
    module, there, attribute = name.partition(":")
    if there and not all(
        part.isidentifier() for text in (module, attribute) for part in text.split(".")
    ):
        raise UsageError(f"scaffold {name!r}: must be a name, or MODULE:ATTRIBUTE")
    if value := name if there else OWN.get(name):
        return EntryPoint(name, value, GROUP)
    points = list(entry_points(group=GROUP, name=name))
    if not points:
        known = names()
        meant = "".join(f"; did you mean {one}?" for one in get_close_matches(name, known, n=1))
        raise UsageError(
            f"scaffold {name!r} is unknown; there are {', '.join(known)}, or MODULE:ATTRIBUTE{meant}"
        )
    if len({point.value for point in points}) > 1:
        raise UsageError(f"scaffold {name!r}: several packages have one of this name")
    return points[0]
