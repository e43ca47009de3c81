"""turnmill why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from turnmill.cli.common import (
    Work,
    a_farm,
    emit,
    execute,
    redis_options,
    terminal,
    with_options,
)
from turnmill.store import Store
from turnmill.why import ABSENT, NOT_HASHED, Difference, differences, find_hash, hashed_fields

SHOWN = 160
"""Characters of a value."""
BEFORE = 40
"""Characters of two long texts that are shown before they part."""


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--json", "as_json", is_flag=True, help="Whole values, as JSON.")
@with_options(redis_options)
def why(
    a: str,
    b: str,
    as_json: bool,
    redis_url: str | None,
    namespace: str | None,
    data: Path | None,
) -> None:
    """Say why two turns are not one: which fields differ.

    A turn is named by its hash, or as RUN/CONVERSATION/TURN of a run in this folder's runs, counted from 0:
    demo/ferry/0. After --epochs the conversation is ID@EPOCH.
    """

    def prepare() -> Work:
        left, right = find_hash(a, Path("runs")), find_hash(b, Path("runs"))
        return lambda: work(left, right)

    async def work(left: str, right: str) -> int:
        async with a_farm(redis_url, namespace, data) as farm:
            redis = farm.connect()
            try:
                store = Store(redis, farm.keys)
                one, other = await hashed_fields(store, left), await hashed_fields(store, right)
            finally:
                await redis.aclose(close_connection_pool=True)
        found = list(differences(one, other))
        if as_json:
            emit(_json(left, right, found))
        else:
            _show(left, right, found)
        return 0

    execute(prepare)


def _json(left: str, right: str, found: list[Difference]) -> str:
    """A side that has nothing at a path has no key for it: null is a value."""
    entries = [
        {"path": one.path}
        | ({} if one.left is ABSENT else {"left": one.left})
        | ({} if one.right is ABSENT else {"right": one.right})
        for one in found
    ]
    report = {"same": not found, "left": left, "right": right, "differences": entries}
    return json.dumps(report | {"not_hashed": NOT_HASHED}, ensure_ascii=False)


def _show(left: str, right: str, found: list[Difference]) -> None:
    for one in found:
        _say(one.path, "bold")
        for side, text in zip("AB", _texts(one.left, one.right), strict=True):
            _say(f"  {side}  {text}")
    if not found:
        _say(f"Same turn: {left}", "bold")
        _say(f"What is no part of a turn may differ: {', '.join(NOT_HASHED)}.")
    elif [one.path for one in found] == ["sample"]:
        _say("Two draws of one question: they differ in nothing else.")
    else:
        _say(f"{len(found)} differences between A, {left[:12]}, and B, {right[:12]}.")


def _texts(left: Any, right: Any) -> tuple[str, str]:
    """Both values, cut short around the place where they part."""
    one, other = _text(left), _text(right)
    start = 0
    if ABSENT not in (left, right) and max(len(one), len(other)) > SHOWN:
        alike = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), None)
        start = max(0, (min(len(one), len(other)) if alike is None else alike) - BEFORE)
    return _cut(one, start), _cut(other, start)


def _text(value: Any) -> str:
    return "(absent)" if value is ABSENT else json.dumps(value, ensure_ascii=False)


def _cut(text: str, start: int) -> str:
    before = f"({start} characters) … " if start else ""
    rest = len(text) - start - SHOWN
    return before + text[start : start + SHOWN] + (f" … ({rest} more)" if rest > 0 else "")


def _say(line: str, style: str = "") -> None:
    terminal.print(Text(line, style=style), soft_wrap=True)
