"""`turnmill drill`, or `python -m turnmill_worker.drill_cli`.

Exit codes: 0 nothing was lost; 1 something was lost, stored twice, wrong or left behind; 2 usage; 3 Redis.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from pydantic_core import to_json
from rich.table import Table

from turnmill.cli.common import Work, a_farm, emit, err, execute, terminal
from turnmill.cli.engine_arguments import WithEngine
from turnmill.settings import Farm
from turnmill_worker.drill import Drill, DrillReport, DrillSettings
from turnmill_worker.engines import ENGINES

LOSS = 1
_DEFAULT = DrillSettings()
_POSITIVE = click.IntRange(min=1)


@click.command(cls=WithEngine)
@click.option("--turns", type=click.IntRange(1, 20_000), default=_DEFAULT.turns, show_default=True)
@click.option(
    "--tokens",
    type=_POSITIVE,
    default=_DEFAULT.tokens,
    show_default=True,
    help="Of an answer, about.",
)
@click.option("--workers", type=_POSITIVE, default=_DEFAULT.workers, show_default=True)
@click.option(
    "--slots", type=_POSITIVE, default=_DEFAULT.slots, show_default=True, help="Of each worker."
)
@click.option("--kills", type=click.IntRange(min=0), default=_DEFAULT.kills, show_default=True)
@click.option(
    "--pause",
    type=click.FloatRange(min=0, min_open=True),
    default=_DEFAULT.pause,
    show_default=True,
    help="Seconds between two kills, at least.",
)
@click.option(
    "--lease",
    type=click.FloatRange(min=0.2),
    default=_DEFAULT.lease,
    show_default=True,
    help="The workers', in seconds.",
)
@click.option(
    "--keep-every",
    type=click.FloatRange(min=0, min_open=True),
    default=_DEFAULT.keep_every,
    show_default=True,
    help="The workers', in seconds.",
)
@click.option(
    "--seed", type=int, default=_DEFAULT.seed, show_default=True, help="Of whom to kill, and when."
)
@click.option(
    "--engine", type=click.Choice(sorted(ENGINES)), default=_DEFAULT.engine, show_default=True
)
@click.option("--model", help="Path or id of the model.")
@click.option(
    "--json", "as_json", is_flag=True, help="The count as JSON, the last line of standard output."
)
@click.option(
    "--redis-url", envvar="REDIS_URL", help="Without it: an embedded server of its own. [REDIS_URL]"
)
@click.argument("engine_arguments", nargs=-1, type=click.UNPROCESSED)
def drill(
    as_json: bool,
    redis_url: str | None,
    model: str | None,
    engine_arguments: tuple[str, ...],
    **options: Any,
) -> None:
    """Kill workers at random while they answer turns, then count what was lost.

    Works in a namespace of its own, which is removed at the end, with workers of its own; nothing else on that Redis is
    touched. Arguments after -- go to the engine.
    """

    def prepare() -> Work:
        worker = ("--model", model) if model else ()
        settings = DrillSettings(**options, worker=worker, engine_arguments=engine_arguments)
        return lambda: work(settings)

    async def work(settings: DrillSettings) -> int:
        with TemporaryDirectory(prefix="turnmill-drill-") as folder:
            async with a_farm(redis_url, None, Path(folder)) as farm:
                own = Farm(farm.url, f"drill-{uuid.uuid4().hex[:12]}")
                a_drill = Drill(settings, own, Path(folder) / "workers.log")
                report = await a_drill.run()
        if as_json:
            emit(to_json(report).decode())
        else:
            terminal.print(_table(report))
        if report.passed:
            return 0
        err.print(
            "The drill has failed: something was lost, stored twice, wrong, or left in a dead worker's hands."
        )
        return LOSS

    execute(prepare)


def _table(report: DrillReport) -> Table:
    table = Table("", "", show_header=False, box=None)
    rows = [
        ("turns", f"{report.turns:,}"),
        ("kills", f"{report.kills}"),
        ("lost", f"{report.lost}"),
        ("stored twice", f"{report.stored_twice}"),
        ("wrong", f"{report.wrong}"),
        ("left in somebody's hands", f"{report.held}"),
        ("turns taken up again", f"{report.re_run:,}"),
        ("tokens", f"{report.tokens:,}"),
        ("tokens made again", f"{report.tokens_made_again:,}"),
        ("seconds to recover, at most", f"{report.seconds_to_recover:g}"),
        ("seconds in all", f"{report.seconds:g}"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def main() -> None:
    drill(prog_name="turnmill drill")


if __name__ == "__main__":
    main()
