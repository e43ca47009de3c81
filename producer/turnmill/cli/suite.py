"""turnmill suite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Group

from turnmill import display
from turnmill.asking import Again
from turnmill.cli.common import (
    BUDGET_SPENT,
    CANCELLED,
    Work,
    emit,
    err,
    execute,
    redis_options,
    terminal,
    with_options,
)
from turnmill.cli.driving import (
    Place,
    a_place,
    attempt_options,
    check,
    drive,
    look_ahead,
    say_left_out,
)
from turnmill.run import RunEnd
from turnmill.spec import Attempt, Plan
from turnmill.suite import Suite, read_suite


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs"),
    show_default=True,
    help="Each run's folder is in this one.",
)
@with_options(attempt_options)
@click.option("--json", "as_json", is_flag=True, help="All reports as JSON on standard output.")
@with_options(redis_options)
def suite(
    file: Path,
    names: tuple[str, ...],
    out: Path,
    again: tuple[Again, ...],
    extend: bool,
    allow_mixed: bool,
    dry_run: bool,
    as_json: bool,
    redis_url: str | None,
    namespace: str | None,
    data: Path | None,
) -> None:
    """Drive the runs that FILE names, one after the other, or those of some NAMEs; the same command goes on.

    FILE is TOML, and a table in it is a run. The file and all that it names are checked before anything is asked. A run whose
    failure budget is spent does not keep the others from being driven.
    """

    def prepare() -> Work:
        found = read_suite(file)
        plans = found.plan(names, out, Attempt(again, extend, allow_mixed))
        for _, plan in plans:
            say_left_out(plan)
        return lambda: work(found, plans)

    async def work(a_suite: Suite, plans: list[tuple[str, Plan]]) -> int:
        async with a_place(redis_url, namespace, data) as place:
            for table, plan in plans:
                with a_suite.naming(table):
                    await check(plan, place)
            if dry_run:
                outlooks = []
                for table, plan in plans:
                    with a_suite.naming(table):
                        outlooks.append((table, await look_ahead(plan, place)))
                if as_json:
                    _emit(a_suite.name, [(t, {"outlook": o.model_dump()}) for t, o in outlooks])
                else:
                    terminal.print(Group(*(display.outlook_table(one) for _, one in outlooks)))
                return 0
            ends = await _drive_all(a_suite, plans, place)
        if as_json:
            _emit(a_suite.name, [(table, _end(end)) for table, end in ends])
        else:
            terminal.print(display.suite_table(a_suite.name, [end for _, end in ends]))
        return _code([end for _, end in ends])

    execute(prepare)


async def _drive_all(
    a_suite: Suite, plans: list[tuple[str, Plan]], place: Place
) -> list[tuple[str, RunEnd]]:
    """How the runs ended; none is driven after one that was cancelled."""
    ends: list[tuple[str, RunEnd]] = []
    for number, (table, plan) in enumerate(plans, start=1):
        err.print(f"run {plan.name} ({number} of {len(plans)})", soft_wrap=True)
        with a_suite.naming(table):
            end = await drive(plan, place)
        err.print(display.end_line(end), soft_wrap=True)
        ends.append((table, end))
        if end.cancelled:
            break
    return ends


def _code(ends: list[RunEnd]) -> int:
    if any(end.cancelled for end in ends):
        err.print("A run was cancelled. The same command goes on from here.")
        return CANCELLED
    if spent := [end.report.run for end in ends if end.budget_spent]:
        err.print(f"The failure budget is spent: {', '.join(spent)}.", soft_wrap=True)
        return BUDGET_SPENT
    return 0


def _end(end: RunEnd) -> dict[str, Any]:
    return {
        "budget_spent": end.budget_spent,
        "unfinished": end.unfinished,
        "report": end.report.model_dump(),
    }


def _emit(suite_name: str, runs: list[tuple[str, dict[str, Any]]]) -> None:
    named = [{"name": table, **fields} for table, fields in runs]
    emit(json.dumps({"suite": suite_name, "runs": named}, ensure_ascii=False))
