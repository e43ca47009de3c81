"""turnmill status."""

from __future__ import annotations

from pathlib import Path

import click

from turnmill import display
from turnmill.cli.common import a_farm, emit, execute, redis_options, terminal, with_options
from turnmill.client import Client


@click.command()
@click.option("--json", "as_json", is_flag=True)
@with_options(redis_options)
def status(as_json: bool, redis_url: str | None, namespace: str | None, data: Path | None) -> None:
    """Queues, runs and workers."""

    async def work() -> int:
        async with (
            a_farm(redis_url, namespace, data) as farm,
            Client(farm.url, namespace=farm.namespace, patience=5.0) as client,
        ):
            seen = await client.status()
        if as_json:
            emit(seen.to_json())
        else:
            terminal.print(display.status_tables(seen))
        return 0

    execute(lambda: work)
