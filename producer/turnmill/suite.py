"""Suites: a TOML file of named runs. docs/suites.md describes it.

[defaults]
data = "questions.jsonl"

[t10_32k]
sampling = { temperature = 1.0, max_tokens = 32768 }
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from turnmill.errors import BadInput, BadLines, UsageError
from turnmill.settings import check_run
from turnmill.spec import Attempt, Plan, RunSpec, plan, problem

DEFAULTS: Final = "defaults"
_MERGED: Final = ("sampling", "set")
"""Tables within a run that go over those of the defaults key by key."""


class _Table(RunSpec):
    """A run's table. `run`: its name, if it is not to be that of suite and table."""

    run: str | None = None


@dataclass(frozen=True)
class SuiteRun:
    """A run of a suite: how its table is called, and what the run is called."""

    table: str
    name: str
    spec: RunSpec


@dataclass(frozen=True)
class Suite:
    """A suite, named after its file; the runs are in the file's order."""

    path: Path
    runs: Sequence[SuiteRun]

    @property
    def name(self) -> str:
        return self.path.stem

    def plan(self, tables: Collection[str], out: Path, attempt: Attempt) -> list[tuple[str, Plan]]:
        """Read the input of the runs of these tables, or of all: tables and plans. Each run has a folder of its name in
        `out`. Raises UsageError for a table that is not there, BadLines with all that is wrong with any run."""
        there = [run.table for run in self.runs]
        for table in tables:
            if table not in there:
                raise UsageError(
                    f"{self.path}: there is no [{table}]; there are [{'], ['.join(there)}]"
                )
        plans, bad = [], []
        for run in self.runs:
            if tables and run.table not in tables:
                continue
            try:
                with self.naming(run.table):
                    plans.append((run.table, plan(run.name, run.spec, out / run.name, attempt)))
            except BadInput as error:
                bad.append(error)
        if bad:
            raise BadLines(bad)
        return plans

    @contextmanager
    def naming(self, table: str) -> Iterator[None]:
        """What is refused inside the block is refused with file and table. Raises BadInput for every UsageError."""
        try:
            yield
        except UsageError as error:
            raise BadInput(str(self.path), 0, f"[{table}] {error}") from error


def read_suite(path: Path) -> Suite:
    """The suite in a file. Raises BadInput for what is no TOML, BadLines with all that is wrong: table and key."""
    try:
        tables = tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise BadInput(str(path), 0, f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise BadInput(str(path), 0, f"not UTF-8: byte {error.start + 1}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadInput(str(path), 0, f"not TOML: {error}") from None
    wrong = list(dict.fromkeys(_wrong(path.stem, tables)))
    if wrong:
        raise BadLines([BadInput(str(path), 0, what) for what in wrong])
    defaults = tables.pop(DEFAULTS, {})
    return Suite(path, [_run(path, table, _merged(defaults, tables[table])) for table in tables])


def _run(path: Path, table: str, fields: dict[str, Any]) -> SuiteRun:
    spec = _Table.model_validate(fields)
    data = path.parent / spec.data
    # Else it is a scaffold's own word, or nothing, which the scaffold says.
    if os.path.exists(data):
        spec = spec.model_copy(update={"data": str(data)})
    return SuiteRun(table, _name(path.stem, table, fields), spec)


def _name(suite: str, table: str, fields: dict[str, Any]) -> str:
    return str(fields.get("run", f"{suite}-{table}"))


def _merged(defaults: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    merged = {**defaults, **table}
    for key in _MERGED:
        below, above = defaults.get(key), table.get(key)
        if isinstance(below, dict) and isinstance(above, dict):
            merged[key] = {**below, **above}
    return merged


def _wrong(suite: str, tables: dict[str, Any]) -> Iterator[str]:
    """All that is wrong with a suite. What is wrong with the defaults is said as often as it is met."""
    flat = [key for key, value in tables.items() if not isinstance(value, dict)]
    for key in flat:
        yield f"{key}: must be a table; what all runs share is in [{DEFAULTS}]"
    runs = {key: value for key, value in tables.items() if key not in (DEFAULTS, *flat)}
    if not runs and not flat:
        yield "there is no run in it"
    defaults = {} if DEFAULTS in flat else tables.get(DEFAULTS, {})
    if "run" in defaults:
        yield f"[{DEFAULTS}] run: is the name of one run"
    taken: dict[str, str] = {}
    for table, fields in runs.items():
        merged = _merged(defaults, fields)
        try:
            _Table.model_validate(merged)
        except ValidationError as error:
            for item in error.errors(include_url=False, include_input=False):
                where = table if _is_set(item, fields) or not _is_set(item, defaults) else DEFAULTS
                yield f"[{where}] {problem(item, _Table)}"
            continue
        name = _name(suite, table, merged)
        try:
            check_run(name)
        except UsageError as error:
            yield f"[{table}] {error}"
        if (other := taken.setdefault(name, table)) != table:
            yield f"[{table}] run: {name!r} is the run of [{other}] already"


def _is_set(item: ErrorDetails, fields: dict[str, Any]) -> bool:
    """Whether what is wrong stands in these fields."""
    value: Any = fields
    for step in item["loc"][:2]:
        if isinstance(value, list):
            return True
        if not isinstance(value, dict) or step not in value:
            return False
        value = value[step]
    return True
