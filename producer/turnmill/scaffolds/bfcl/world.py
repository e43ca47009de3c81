"""What the calls of one conversation act on: the benchmark's simulated classes."""

from __future__ import annotations

import itertools
import keyword
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker, multi_turn_utils

from turnmill.scaffolds.bfcl.entries import Entry
from turnmill.scaffolds.told import json_object

_number = itertools.count()
_TOLD = "turnmill" + "0" * 12
"""The name of instances as the model is told it: the same in every attempt, and as long as the real ones, for functions count letters."""
_MOST_BITS = 50_000
_MOST_PLACES = 10_000
"""Of a number that is computed. More than 4,300 digits of a whole one Python does not write down."""


class NoCall(ValueError):
    """What the model wrote is no call: by the benchmark's rules its turn ends."""


class World:
    """The instances of one conversation. Opened by `world`."""

    def __init__(self, entry: Entry, name: str) -> None:
        self._entry, self.name = entry, name
        self._methods: set[str] = set()
        _, instances = self._run([])
        for instance in instances.values():
            found = (one for one in dir(instance) if not one.startswith("_"))
            self._methods |= {one for one in found if callable(getattr(instance, one))}

    def execute(self, calls: Sequence[str]) -> list[str]:
        """What each call returned, as the model is told it."""
        results, _ = self._run(list(calls))
        # The benchmark puts the name before whatever looks like a call of its methods, inside of texts, too.
        return [str(result).replace(self.name, _TOLD) for result in results]

    def call_of(self, function: dict[str, Any]) -> str:
        """A model's function call as the benchmark writes it: `name(key=value,...)`. Raises NoCall.

        The benchmark evaluates these as Python. So a name that is no method of the simulated classes is made one that
        nothing has, whatever it means to Python, and keys must be plain names. A call that would compute for hours is
        treated as such a name, for it would hold up all conversations.
        """
        name = str(function.get("name", ""))
        arguments = json_object(function.get("arguments"), strict=True)
        if arguments is None:
            raise NoCall("its arguments are no JSON object")
        for word in (name, *arguments):
            if not word.isidentifier() or keyword.iskeyword(word):
                raise NoCall(f"{word!r} is no name")
        if name not in self._methods or _is_endless(arguments):
            name = f"no_function_{name}"
        return f"{name}({','.join(f'{key}={value!r}' for key, value in arguments.items())})"

    def _run(self, calls: list[str]) -> tuple[list[Any], dict[str, Any]]:
        fields = self._entry.fields
        results, instances = multi_turn_utils.execute_multi_turn_func_call(
            calls,
            fields["initial_config"],
            fields["involved_classes"],
            self.name,
            self._entry.id,
            long_context=self._entry.long_context,
        )
        return results, instances


def _is_endless(arguments: dict[str, Any]) -> bool:
    """Whether arithmetic with this would take too long: Python's numbers may have any size."""
    base, exponent = arguments.get("base"), arguments.get("exponent")
    if isinstance(base, int) and isinstance(exponent, int):
        return base.bit_length() * exponent > _MOST_BITS
    places = (arguments.get("precision"), arguments.get("decimal_places"))
    return any(isinstance(one, int | float) and abs(one) > _MOST_PLACES for one in places)


@contextmanager
def world(entry: Entry) -> Iterator[World]:
    """A world of its own inside the block."""
    with _scratch() as name:
        yield World(entry, name)


def judge(entry: Entry, calls: list[list[list[str]]]) -> dict[str, Any]:
    """The verdict of the benchmark's own checker on the calls: by turn, by step. `valid`, and why not."""
    if len(calls) != len(entry.truth):
        return {"valid": False, "error_type": "multi_turn:force_terminated"}
    category = entry.id.rpartition("_")[0]
    with _scratch() as name:
        verdict: dict[str, Any] = multi_turn_checker.multi_turn_checker(
            calls, entry.truth, dict(entry.fields), category, name
        )
    return verdict


@contextmanager
def _scratch() -> Iterator[str]:
    """A name for instances, which the benchmark keeps in a module's globals for ever: here, until the block ends."""
    name = f"turnmill{next(_number):012}"
    kept = vars(multi_turn_utils)
    try:
        yield name
    finally:
        for one in [one for one in list(kept) if one.startswith(name)]:
            del kept[one]
