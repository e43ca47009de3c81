"""The command line: which benchmarks, how many rounds, a table and JSON."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import click
from rich.console import Console

from benchmarks.measure import ROUNDS
from benchmarks.report import Result
from turnmill.errors import UsageError

BENCHES = (
    "queue",
    "enqueue",
    "backlog",
    "slots",
    "waiters",
    "idle",
    "overhead",
    "resume",
    "cache",
    "sglang",
    "gateway",
    "gateway-load",
)


@click.command()
@click.argument("bench", type=click.Choice(["all", *BENCHES]), default="all")
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
@click.option("--rounds", type=click.IntRange(min=1), default=ROUNDS, show_default=True)
@click.option("--trace", type=click.Path(path_type=Path), help="A CSV file, for gateway-load.")
@click.option("--speed", type=click.FloatRange(0, min_open=True), help="For gateway-load. [1]")
def main(bench: str, as_json: bool, rounds: int, trace: Path | None, speed: float | None) -> None:
    """Measure. Tables go to standard output, what is going on to standard error."""
    special = {key: value for key, value in (("trace", trace), ("speed", speed)) if value}
    if special and bench != "gateway-load":
        raise click.UsageError(f"--{next(iter(special))} is for gateway-load")
    out = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    results: list[Result] = []
    for name in BENCHES if bench == "all" else (bench,):
        module = import_module(f"benchmarks.{name.replace('-', '_')}")
        try:
            result = module.run(rounds, lambda text, name=name: _say(f"{name}: {text}"), **special)
        except UsageError as error:
            raise click.UsageError(str(error)) from None
        result.show(out)
        results.append(result)
    if as_json:
        objects = [result.to_json() for result in results]
        print(json.dumps(objects[0] if bench != "all" else {o["bench"]: o for o in objects}))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
