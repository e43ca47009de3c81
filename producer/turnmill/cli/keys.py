"""turnmill keys."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.table import Table

from turnmill.api_keys import ApiKey, ApiKeys
from turnmill.cli.common import a_farm, emit, err, execute, redis_options, terminal, with_options
from turnmill.errors import UsageError


@click.group()
def keys() -> None:
    """Keys of those who ask `turnmill serve`."""


@keys.command()
@click.argument("name")
@click.option("--models", help="Models that it may ask for, with commas between. [all]")
@click.option("--max-queued", type=click.IntRange(min=1), help="Open turns at once. [any number]")
@with_options(redis_options)
def add(
    name: str,
    models: str | None,
    max_queued: int | None,
    redis_url: str | None,
    namespace: str | None,
    data: Path | None,
) -> None:
    """Make a key for NAME, and print it: it is shown this once."""

    async def work(api_keys: ApiKeys) -> int:
        allowed = tuple(part.strip() for part in models.split(",")) if models else None
        if allowed and not all(allowed):
            raise UsageError(f"--models {models!r}: names of models, with commas between")
        emit(await api_keys.add(name, allowed, max_queued))
        err.print("Keep it: only its SHA-256 is stored.")
        return 0

    _on_farm(work, redis_url, namespace, data)


@keys.command("list")
@click.option("--json", "as_json", is_flag=True)
@with_options(redis_options)
def list_keys(
    as_json: bool, redis_url: str | None, namespace: str | None, data: Path | None
) -> None:
    """The keys, without what is secret."""

    async def work(api_keys: ApiKeys) -> int:
        found = await api_keys.all()
        if as_json:
            emit(json.dumps([key.model_dump() for key in found]))
        else:
            terminal.print(_table(found))
        return 0

    _on_farm(work, redis_url, namespace, data)


@keys.command()
@click.argument("name")
@with_options(redis_options)
def revoke(name: str, redis_url: str | None, namespace: str | None, data: Path | None) -> None:
    """End the key of NAME. What was asked with it stays in the queue, and its runs stay those of NAME."""

    async def work(api_keys: ApiKeys) -> int:
        if not await api_keys.revoke(name):
            raise UsageError(f"there is no key {name!r}")
        return 0

    _on_farm(work, redis_url, namespace, data)


def _table(found: list[ApiKey]) -> Table:
    table = Table("key", "models", "max queued", "made", box=None)
    for key in found:
        table.add_row(
            key.name,
            ", ".join(key.models) if key.models else "all",
            str(key.max_queued) if key.max_queued else "any number",
            datetime.fromtimestamp(key.created, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        )
    return table


def _on_farm(
    work: Callable[[ApiKeys], Awaitable[int]],
    redis_url: str | None,
    namespace: str | None,
    data: Path | None,
) -> None:
    async def on_farm() -> int:
        async with a_farm(redis_url, namespace, data) as farm, farm.connect() as redis:
            return await work(ApiKeys(redis, farm.keys))

    execute(lambda: on_farm)
