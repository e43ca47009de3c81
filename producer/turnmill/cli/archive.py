"""turnmill archive, turnmill restore."""

from __future__ import annotations

from pathlib import Path

import click
from pydantic_core import to_json

from turnmill.archive import Archive
from turnmill.cli.common import (
    Work,
    a_farm,
    emit,
    execute,
    redis_options,
    terminal,
    with_options,
)
from turnmill.settings import check_name


@click.command()
@click.argument("run")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="[RUN.jsonl.xz]")
@click.option("--keep-stored", is_flag=True, help="Only write the file; free nothing.")
@click.option("--json", "as_json", is_flag=True)
@with_options(redis_options)
def archive(
    run: str,
    out: Path | None,
    keep_stored: bool,
    as_json: bool,
    redis_url: str | None,
    namespace: str | None,
    data: Path | None,
) -> None:
    """Write RUN into a file, with all its answers, and free what no other run holds."""

    def prepare() -> Work:
        file = out or Path(f"{check_name(run, 'run')}.jsonl.xz")
        return lambda: work(file)

    async def work(file: Path) -> int:
        async with a_farm(redis_url, namespace, data) as farm:
            redis = farm.connect()
            try:
                done = await Archive(redis, farm.keys).archive(run, file, keep_stored=keep_stored)
            finally:
                await redis.aclose(close_connection_pool=True)
        if as_json:
            emit(to_json(done).decode())
            return 0
        effects = f" and {done.effects} effects" if done.effects else ""
        line = f"{done.file}: {done.turns} turns{effects} of run {run}, {done.bytes:,} bytes"
        if not keep_stored:
            line += f"; {done.dropped} answers freed"
        if done.left:
            line += f"; {done.left} turns changed meanwhile and stay: the same command takes them"
        terminal.print(line, soft_wrap=True)
        return 0

    execute(prepare)


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True)
@with_options(redis_options)
def restore(
    file: Path, as_json: bool, redis_url: str | None, namespace: str | None, data: Path | None
) -> None:
    """Bring back the run in FILE, which `turnmill archive` has written."""

    async def work() -> int:
        async with a_farm(redis_url, namespace, data) as farm:
            redis = farm.connect()
            try:
                done = await Archive(redis, farm.keys).restore(file)
            finally:
                await redis.aclose(close_connection_pool=True)
        if as_json:
            emit(to_json(done).decode())
            return 0
        there = done.turns - done.stored
        effects = f" and {done.effects} effects" if done.effects else ""
        line = f"run {done.run}: {done.turns} turns{effects} are back"
        terminal.print(
            line + (f"; of the turns, {there} were there or have no answer" if there else ""),
            soft_wrap=True,
        )
        return 0

    execute(lambda: work)
