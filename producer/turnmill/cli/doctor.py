"""turnmill doctor."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click
from pydantic_core import to_json
from rich.text import Text

from turnmill.cli.common import PERMANENT, emit, execute, redis_options, terminal, with_options
from turnmill.doctor import Check, examine, found_farm, unreachable
from turnmill.embedded import default_data_dir
from turnmill.keys import DEFAULT_NAMESPACE
from turnmill.settings import Farm, check_name

SOMETHING_IS_BAD = 1
STYLES = {"ok": "green", "warn": "yellow", "bad": "bold red"}


@click.command()
@click.option("--model", help="Path or id of a model to look at, too.")
@click.option("--json", "as_json", is_flag=True)
@with_options(redis_options)
def doctor(
    model: str | None,
    as_json: bool,
    redis_url: str | None,
    namespace: str | None,
    data: Path | None,
) -> None:
    """Look for what is wrong with the farm and this machine. Changes nothing.

    Without a Redis, the embedded server is looked at if it runs; none is started.

    Exits with 1 if something is bad, with 3 if Redis is away or refuses.
    """

    async def work() -> int:
        folder = None if redis_url else data or default_data_dir()
        if folder is None:
            farm: Farm | None = Farm.from_environment(redis_url, namespace)
        else:
            named = check_name(namespace or DEFAULT_NAMESPACE, "namespace")
            farm = found_farm(folder, named)
        checks = await examine(farm, data=folder, runs=Path("runs"), model=model)
        states: Counter[str] = Counter(check.state for check in checks)
        if as_json:
            emit(to_json({"bad": states["bad"], "warn": states["warn"], "checks": checks}).decode())
        else:
            _show(checks, states)
        if unreachable(checks):
            return PERMANENT
        return SOMETHING_IS_BAD if states["bad"] else 0

    execute(lambda: work)


def _show(checks: list[Check], states: Counter[str]) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        state = Text(f"{check.state:<4}", style=STYLES[check.state])
        terminal.print(
            Text.assemble(state, f"  {check.name:<{width}}  {check.says}"), soft_wrap=True
        )
        if check.advice:
            terminal.print(Text(f"      {'':<{width}}  → {check.advice}"), soft_wrap=True)
    found = [f"{states[state]} {state}" for state in ("bad", "warn") if states[state]]
    terminal.print(", ".join(found) or "All is well.")
