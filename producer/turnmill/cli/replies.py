"""turnmill replies."""

from __future__ import annotations

from pathlib import Path

import click

from turnmill.cli.common import emit, execute
from turnmill.errors import BadInput
from turnmill.output import PARTIAL, REPLIES, read_results
from turnmill.settings import check_name


@click.command()
@click.argument("run")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="[runs/RUN]")
def replies(run: str, out: Path | None) -> None:
    """Print the conversations of RUN that have ended, a JSON line each, at any time."""

    async def work() -> int:
        folder = out or Path("runs") / check_name(run, "run")
        found = [folder / name for name in (REPLIES, PARTIAL) if (folder / name).exists()]
        if not found:
            raise BadInput(str(folder), 0, "there are no replies in it")
        results = {}
        for path in found:
            results.update({result.key: result for result in read_results(path)})
        for result in results.values():
            emit(result.model_dump_json())
        return 0

    execute(lambda: work)
