"""turnmill cancel."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import click

from turnmill.cli.common import a_farm, emit, execute, redis_options, terminal, with_options
from turnmill.client import Client
from turnmill.errors import UsageError
from turnmill.faults import patiently
from turnmill.store import RunInfo

PATIENCE = 5.0
LOOK_SECONDS = 0.1


@click.command()
@click.argument("run")
@click.option("--json", "as_json", is_flag=True)
@with_options(redis_options)
def cancel(
    run: str, as_json: bool, redis_url: str | None, namespace: str | None, data: Path | None
) -> None:
    """Give up all turns of RUN; what other runs want goes on for them. Its producer, if it has one, ends."""

    async def work() -> int:
        async with (
            a_farm(redis_url, namespace, data) as farm,
            Client(farm.url, namespace=farm.namespace, patience=PATIENCE) as client,
        ):
            before = await _counters(client, run)
            marked = await patiently(
                lambda: _mark(client, run), patience=PATIENCE, doing="cancelling"
            )
            waits_for = await _until_cleared(client, run)
            after = await _counters(client, run)
        cancelled = after.cancelled - before.cancelled
        if as_json:
            emit(
                json.dumps(
                    {"run": run, "marked": marked, "cancelled": cancelled, "cleared": not waits_for}
                )
            )
        elif not before.open:
            terminal.print(f"run {run}: no turn is open", soft_wrap=True)
        elif waits_for:
            terminal.print(
                f"run {run}: its {before.open} open turns are marked, and none of them will begin; no worker of "
                f"{', '.join(waits_for)} lives, the next one will clear them",
                soft_wrap=True,
            )
        else:
            terminal.print(f"run {run}: {cancelled} turns cancelled", soft_wrap=True)
        return 0

    execute(lambda: work)


async def _counters(client: Client, run: str) -> RunInfo:
    for info in await patiently(client.store.runs, patience=PATIENCE, doing="reading runs"):
        if info.name == run:
            return info
    raise UsageError(f"no run {run!r} is known here")


async def _mark(client: Client, run: str) -> int:
    """Mark the run's turns in every model's queue. Returns how many."""
    models = await client.store.models()
    return sum([await client.queue.cancel(model, run) for model in models])


async def _until_cleared(client: Client, run: str) -> list[str]:
    """Wait until no marked turn is left. Workers clear them: returns the models that nobody serves, if only
    their turns are left."""

    async def left() -> tuple[set[str], set[str]]:
        store, keys = client.store, client.farm.keys
        sweeping = {
            model
            for model in await store.models()
            if await store.redis.exists(keys.swept(model, run))
        }
        return sweeping, {worker.model for worker in await store.workers()}

    while True:
        sweeping, served = await patiently(left, patience=PATIENCE, doing="reading the queue")
        if not sweeping & served:
            return sorted(sweeping)
        await asyncio.sleep(LOOK_SECONDS)
