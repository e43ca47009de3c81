"""turnmill run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from turnmill import display
from turnmill.asking import LASTING, Again
from turnmill.cli.common import (
    BUDGET_SPENT,
    CANCELLED,
    Work,
    emit,
    err,
    execute,
    redis_options,
    terminal,
    with_options,
)
from turnmill.cli.driving import a_place, attempt_options, drive, look_ahead, say_left_out
from turnmill.cli.engine_arguments import WithEngine
from turnmill.errors import UsageError
from turnmill.output import PARTIAL, REPLIES
from turnmill.run import RunEnd
from turnmill.scaffolds.finding import OWN, takes
from turnmill.spec import Attempt, Plan, RunSpec, plan, problems
from turnmill.turn import Sampling

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


@click.command(cls=WithEngine)
@click.argument("file")
@click.option(
    "--scaffold",
    default="multi_turn_chat",
    show_default=True,
    help=f"What drives the conversations: {', '.join(OWN)}, another that is installed, or MODULE:ATTRIBUTE.",
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
    "--keep",
    metavar="DURATION",
    help="Forget the answers so long after the run has ended: 90s, 30m, 12h, 7d. [never]",
)
@with_options(attempt_options)
@click.option("--json", "as_json", is_flag=True, help="The report as JSON on standard output.")
@with_options(_sampling_options)
@with_options(redis_options)
@click.argument("engine_arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    file: str,
    options: tuple[str, ...],
    unsafe_local: bool,
    name: str,
    out: Path | None,
    again: tuple[Again, ...],
    extend: bool,
    allow_mixed: bool,
    dry_run: bool,
    as_json: bool,
    redis_url: str | None,
    namespace: str | None,
    data: Path | None,
    **given: Any,
) -> None:
    """Drive the conversations of FILE; run again, go on where it stopped.

    FILE has a conversation a line, or MT-Bench's or Multi-IF's; a name that ends in .csv is Multi-IF's table; - is standard
    input. Other scaffolds read other files. Without a Redis, an embedded server and one worker are started; arguments after
    -- go to that worker's engine.
    """

    def prepare() -> Work:
        spec = _spec(file, _scaffold_options(options, unsafe_local), given)
        if unsafe_local and not takes(spec.scaffold, "unsafe_local"):
            raise UsageError(
                f"--unsafe-local: scaffold {spec.scaffold!r} has no sandbox to do without"
            )
        planned = plan(name, spec, out or Path("runs") / name, Attempt(again, extend, allow_mixed))
        say_left_out(planned)
        if redis_url and (spec.engine or spec.slots or spec.engine_arguments):
            raise UsageError(
                "REDIS_URL is set: its workers are used, --engine and its arguments are not"
            )
        return lambda: work(planned)

    async def work(planned: Plan) -> int:
        async with a_place(redis_url, namespace, data) as place:
            if dry_run:
                outlook = await look_ahead(planned, place)
                if as_json:
                    emit(outlook.model_dump_json())
                else:
                    terminal.print(display.outlook_table(outlook))
                return 0
            end = await drive(planned, place)
        return _report(end, planned.folder, as_json)

    execute(prepare)


def _spec(file: str, options: dict[str, str], given: dict[str, Any]) -> RunSpec:
    """What was typed. Raises UsageError."""
    # `--seed` is the run's, from which draws get theirs.
    sampling = {
        name: given.pop(name) for name in Sampling.model_fields.keys() & given.keys() - {"seed"}
    }
    sampling["stop"] = list(sampling["stop"]) or None
    given["engine_arguments"] = list(given["engine_arguments"])
    try:
        return RunSpec.model_validate({"data": file, "set": options, "sampling": sampling, **given})
    except ValidationError as error:
        raise UsageError("; ".join(problems(error))) from None


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
    if failed := end.report.outcomes.failed:
        how = (
            "What failed for good is asked again with --again failed."
            if LASTING & end.report.failures.keys()
            else "The same command tries again."
        )
        err.print(
            f"{failed} conversation{'s' * (failed != 1)} failed; each line's error says why. {how}",
            soft_wrap=True,
        )
    if end.cancelled:
        err.print("The run was cancelled. The same command goes on from here.")
        return CANCELLED
    if end.budget_spent:
        err.print("The failure budget is spent.")
        return BUDGET_SPENT
    return 0


def _scaffold_options(given: tuple[str, ...], unsafe_local: bool) -> dict[str, str]:
    options: dict[str, str] = {"unsafe_local": "true"} if unsafe_local else {}
    for text in given:
        name, there, value = text.partition("=")
        if not there or not name:
            raise UsageError(f"--set {text!r}: NAME=VALUE")
        options[name] = value
    return options
