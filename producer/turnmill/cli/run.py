"""turnmill run."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import click
from pydantic import ValidationError
from rich.live import Live

from turnmill import display
from turnmill.asking import AGAIN, Again
from turnmill.budget import FailureBudget
from turnmill.cli.common import (
    BUDGET_SPENT,
    CANCELLED,
    Work,
    a_farm,
    emit,
    err,
    execute,
    redis_options,
    terminal,
    with_options,
)
from turnmill.client import Client
from turnmill.errors import UsageError
from turnmill.faults import patiently
from turnmill.lines import Item, Loaded
from turnmill.local_farm import WorkerCommand, WorkerProcess
from turnmill.output import PARTIAL, REPLIES, RunFiles
from turnmill.run import Run, RunEnd, RunSettings
from turnmill.scaffolds.base import Scaffold
from turnmill.scaffolds.finding import find
from turnmill.settings import check_name, parse_duration
from turnmill.tasks import end_tasks
from turnmill.turn import Sampling, explain

LINE_SECONDS = 10.0

_sampling_options = [
    click.option("--temperature", type=float),
    click.option("--top-p", type=float),
    click.option("--top-k", type=int),
    click.option("--min-p", type=float),
    click.option("--max-tokens", type=int, help="The most tokens of one answer."),
    click.option("--stop", multiple=True, help="May be given several times."),
    click.option("--frequency-penalty", type=float),
    click.option("--presence-penalty", type=float),
    click.option("--repetition-penalty", type=float),
    click.option("--logprobs", is_flag=True, default=None),
    click.option("--top-logprobs", type=int),
]


@click.command()
@click.argument("file")
@click.option(
    "--scaffold",
    default="multi_turn_chat",
    show_default=True,
    help="What drives the conversations: a name, or MODULE:ATTRIBUTE.",
)
@click.option(
    "--set",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="An option of the scaffold. May be given several times.",
)
@click.option(
    "--unsafe-local",
    is_flag=True,
    help="Where there is no sandbox, let a model's commands do all that you may.",
)
@click.option(
    "--limit", type=click.IntRange(min=1), help="Only the first N conversations, after shuffling."
)
@click.option("--shuffle", type=int, metavar="SEED", help="In another order, the same for a SEED.")
@click.option("--run", "name", required=True, help="The run's name: the same name goes on.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="[runs/NAME]")
@click.option("--model", help="Path or id for the worker started here; else the name to ask for.")
@click.option("--engine", help="Engine of the worker started here. [local]")
@click.option("--served-name", help="The name that turns ask for. [the model's]")
@click.option(
    "--slots", type=click.IntRange(min=1), help="Turns at once in the worker started here."
)
@click.option(
    "--concurrency",
    default="auto",
    show_default=True,
    help="Conversations at once: auto or a number.",
)
@click.option(
    "--max-failures",
    default="5%",
    show_default=True,
    help="Failed conversations before the run stops: N or N%.",
)
@click.option(
    "--epochs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How often each conversation is held, with draws of its own each time.",
)
@click.option("--seed", type=int, help="Makes every draw repeatable.")
@click.option(
    "--reuse",
    type=click.Choice(["run", "all"]),
    default="run",
    show_default=True,
    help="Draws are of this run alone, or shared by all runs that say so.",
)
@click.option("--skip-bad", is_flag=True, help="Leave bad lines out instead of refusing the file.")
@click.option(
    "--again",
    type=click.Choice(AGAIN),
    multiple=True,
    help="Ask again what is stored with this ending. May be given several times.",
)
@click.option("--extend", is_flag=True, help="Take changed input or settings under the same name.")
@click.option(
    "--keep",
    metavar="DURATION",
    help="Forget the answers so long after the run has ended: 90s, 30m, 12h, 7d. [never]",
)
@click.option("--json", "as_json", is_flag=True, help="The report as JSON on standard output.")
@with_options(_sampling_options)
@with_options(redis_options)
@click.argument("engine_arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    file: str,
    scaffold: str,
    options: tuple[str, ...],
    unsafe_local: bool,
    limit: int | None,
    shuffle: int | None,
    name: str,
    out: Path | None,
    model: str | None,
    engine: str | None,
    served_name: str | None,
    slots: int | None,
    concurrency: str,
    max_failures: str,
    epochs: int,
    seed: int | None,
    reuse: Literal["run", "all"],
    skip_bad: bool,
    again: tuple[Again, ...],
    extend: bool,
    keep: str | None,
    as_json: bool,
    redis_url: str | None,
    namespace: str | None,
    data: Path | None,
    engine_arguments: tuple[str, ...],
    **sampling: Any,
) -> None:
    """Drive the conversations of FILE; run again, go on where it stopped.

    FILE has a conversation a line, or MT-Bench's lines; - is standard input. Other scaffolds read other files. Without a Redis, an embedded
    server and one worker are started; arguments after -- go to that worker's engine.
    """

    def prepare() -> Work:
        check_name(name, "run")
        found = find(scaffold, _scaffold_options(options, unsafe_local))
        settings = RunSettings(
            name=name,
            model="",
            scaffold=scaffold,
            sampling=_sampling(sampling),
            epochs=epochs,
            seed=seed,
            reuse=reuse,
            concurrency=_concurrency(concurrency),
            max_failures=FailureBudget.parse(max_failures),
            again=frozenset(again),
            extend=extend,
            keep=None if keep is None else parse_duration(keep),
        )
        loaded: Loaded[Item] = found.read(file, skip_bad)
        for bad in loaded.bad:
            err.print(f"left out: {bad}", markup=False, soft_wrap=True)
        if redis_url and (engine or slots or engine_arguments):
            raise UsageError(
                "REDIS_URL is set: its workers are used, --engine and its arguments are not"
            )
        items = chosen(loaded.items, limit, shuffle)
        return lambda: work(settings, found, items)

    async def work(settings: RunSettings, scaffold: Scaffold[Any], items: Sequence[Item]) -> int:
        folder = out or Path("runs") / name
        async with contextlib.AsyncExitStack() as stack:
            files = stack.enter_context(RunFiles(folder, name))
            worker = None
            farm = await stack.enter_async_context(a_farm(redis_url, namespace, data))
            if not redis_url:
                command = WorkerCommand(
                    engine or "local", model, served_name, slots, engine_arguments
                )
                worker = WorkerProcess(command, farm, folder / "worker.log")
                worker.start()
                stack.push_async_callback(asyncio.to_thread, worker.stop)
            async with (
                Client(farm.url, namespace=farm.namespace, run=name, patience=None) as client,
                _kept_alive(worker),
            ):
                if worker:
                    asked = await worker.served_model(client.store)
                else:
                    asked = served_name or model or await _only_model(client)
                a_run = Run(
                    replace(settings, model=asked),
                    items,
                    scaffold,
                    client,
                    files,
                )
                end = await _show_while(a_run, name)
        return _report(end, folder, as_json)

    execute(prepare)


def _report(end: RunEnd, folder: Path, as_json: bool) -> int:
    if as_json:
        emit(end.report.model_dump_json())
    else:
        terminal.print(display.report_table(end))
        if not end.report.asked and not end.unfinished:
            terminal.print(
                "Nothing new was asked."
                if end.report.failures
                else "Everything was answered from the store: nothing was asked again."
            )
        name = PARTIAL if end.unfinished else REPLIES
        terminal.print(f"{folder / name}, {folder / 'report.json'}", soft_wrap=True)
    failed = end.report.outcomes.failed
    if failed:
        err.print(
            f"{failed} conversation{'s' * (failed != 1)} failed; each line's error says why. What failed for good is asked again "
            "with --again failed.",
            soft_wrap=True,
        )
    if end.cancelled:
        err.print("The run was cancelled. The same command goes on from here.")
        return CANCELLED
    if end.budget_spent:
        err.print("The failure budget is spent.")
        return BUDGET_SPENT
    return 0


async def _show_while(a_run: Run, name: str) -> RunEnd:
    driving = asyncio.create_task(a_run.drive())
    try:
        if err.is_terminal:
            with Live(
                display.LiveProgress(name, a_run.progress), console=err, refresh_per_second=4
            ):
                return await driving
        while not driving.done():
            await asyncio.wait({driving}, timeout=LINE_SECONDS)
            if not driving.done():
                err.print(display.progress_line(a_run.progress), markup=False, soft_wrap=True)
        return await driving
    finally:
        await end_tasks([driving])


@contextlib.asynccontextmanager
async def _kept_alive(worker: WorkerProcess | None) -> Any:
    """Inside the block the worker is started again when it ends. If that is no use, the block is left with
    the worker's own words."""
    if worker is None:
        yield
        return
    keeper = asyncio.create_task(worker.keep_alive())
    body = asyncio.current_task()
    assert body is not None
    keeper.add_done_callback(lambda task: None if task.cancelled() else body.cancel())
    try:
        yield
    except asyncio.CancelledError:
        if keeper.done() and not keeper.cancelled():
            keeper.result()
        raise
    finally:
        await end_tasks([keeper])


async def _only_model(client: Client) -> str:
    """The model that the live workers serve, once there is a worker."""
    said = False
    while True:
        workers = await patiently(client.store.workers, patience=None, doing="looking for workers")
        models = sorted({worker.model for worker in workers})
        if len(models) == 1:
            return models[0]
        if models:
            raise UsageError(f"workers serve {', '.join(models)}: choose one with --model")
        if not said:
            err.print(
                "no live worker yet, and no --model: waiting for a worker to say what it serves"
            )
        said = True
        await asyncio.sleep(1.0)


def chosen(items: Sequence[Item], limit: int | None, shuffle: int | None) -> Sequence[Item]:
    """The items of a run, in its order."""
    if shuffle is not None:
        items = random.Random(shuffle).sample(items, len(items))
    return items[:limit]


def _scaffold_options(given: Sequence[str], unsafe_local: bool) -> dict[str, str]:
    options: dict[str, str] = {"unsafe_local": "true"} if unsafe_local else {}
    for text in given:
        name, there, value = text.partition("=")
        if not there or not name:
            raise UsageError(f"--set {text!r}: NAME=VALUE")
        options[name] = value
    return options


def _sampling(options: dict[str, Any]) -> Sampling:
    options["stop"] = list(options["stop"]) or None
    try:
        return Sampling(**options)
    except ValidationError as error:
        raise UsageError(f"sampling: {explain(error)}") from None


def _concurrency(text: str) -> int | None:
    if text == "auto":
        return None
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise UsageError(f"concurrency {text!r}: auto, or a number of conversations")
    return int(text)
