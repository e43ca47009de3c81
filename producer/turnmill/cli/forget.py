"""turnmill forget."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

import click
from pydantic_core import to_json

from turnmill.cli.common import (
    Work,
    a_farm,
    emit,
    execute,
    redis_options,
    terminal,
    with_options,
)
from turnmill.errors import UsageError
from turnmill.holdings import AnswerForgotten, Holdings, RunForgotten
from turnmill.ownership import sole_producer
from turnmill.settings import check_name


@click.command()
@click.argument("names", metavar="RUN|HASH...", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask first.")
@click.option("--json", "as_json", is_flag=True)
@with_options(redis_options)
def forget(
    names: tuple[str, ...],
    yes: bool,
    as_json: bool,
    redis_url: str | None,
    namespace: str | None,
    data: Path | None,
) -> None:
    """Drop stored answers for good.

    Of a RUN: all that no other run holds, and the run itself; one that is not there is no error. A HASH: that answer,
    whoever holds it.
    """

    def prepare() -> Work:
        hashes = [name for name in names if re.fullmatch(r"[0-9a-f]{64}", name)]
        runs = [check_name(name, "run") for name in names if name not in hashes]
        if not yes:
            if not sys.stdin.isatty():
                raise UsageError("forget drops answers for good: say --yes")
            if not click.confirm(f"Drop for good what is stored of {', '.join(names)}?", err=True):
                raise UsageError("nothing was dropped")
        return lambda: work(list(dict.fromkeys(runs)), hashes)

    async def work(runs: list[str], hashes: list[str]) -> int:
        async with contextlib.AsyncExitStack() as stack:
            farm = await stack.enter_async_context(a_farm(redis_url, namespace, data))
            redis = farm.connect()
            stack.push_async_callback(redis.aclose, close_connection_pool=True)
            holdings = Holdings(redis, farm.keys, patience=None)
            for run in runs:  # before the first is touched
                await stack.enter_async_context(sole_producer(redis, farm.keys.producer(run), run))
                await holdings.check_over(run)
            of_runs = [await holdings.forget_run(run) for run in runs]
            answers = await holdings.forget_answers(hashes)
        if as_json:
            emit(to_json({"runs": of_runs, "answers": answers}).decode())
        else:
            for line in (*map(_of_run, of_runs), *map(_of_answer, answers)):
                terminal.print(line, soft_wrap=True)
        return 0

    execute(prepare)


def _of_run(one: RunForgotten) -> str:
    if not one.existed:
        return f"run {one.run}: there is none"
    kept = one.turns - one.dropped
    line = f"run {one.run}: {one.dropped} answers dropped"
    if kept:
        line += f"; {kept} turns had none, or are held by other runs too"
    if one.left:
        line += f"; {one.left} turns were asked meanwhile and stay"
    return line


def _of_answer(one: AnswerForgotten) -> str:
    if one.state == "dropped":
        held = f"; it was held by {', '.join(one.runs)}, and asking again makes it anew"
        return f"{one.hash}: dropped{held if one.runs else ''}"
    why = {
        "open": f"it is open, for {', '.join(one.runs)}",
        "unknown": "no answer of it is stored",
        "changed": "it changed at this moment",
    }
    return f"{one.hash}: nothing dropped, {why[one.state]}"
