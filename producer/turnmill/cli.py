"""The command line. The only place of this package that prints.

Exit codes: 0 ended within its budget; 1 budget spent; 2 usage or input; 3 Redis or the configuration
refuses for good; 130, 143 interrupted: the same command goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import click
from pydantic import ValidationError
from redis.exceptions import RedisError
from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler

from turnmill import display
from turnmill.budget import FailureBudget
from turnmill.client import Client
from turnmill.conversations import Conversation, read_conversations
from turnmill.embedded import EmbeddedServer, default_data_dir
from turnmill.errors import BadInput, TurnmillError, UsageError
from turnmill.faults import passes, patiently, translate
from turnmill.keys import DEFAULT_NAMESPACE
from turnmill.local_farm import WorkerCommand, WorkerProcess
from turnmill.output import PARTIAL, REPLIES, RunFiles, read_results
from turnmill.run import Run, RunEnd, RunSettings
from turnmill.scaffolds.multi_turn_chat import multi_turn_chat
from turnmill.settings import Farm, check_name
from turnmill.tasks import end_tasks
from turnmill.turn import Sampling, explain

BUDGET_SPENT, USAGE, PERMANENT = 1, 2, 3
LINE_SECONDS = 10.0
CLEANUP_SECONDS = 15.0


class _Terminal(Console):
    def on_broken_pipe(self) -> None:
        """Ours to handle: rich would exit with 1, which means something else here."""
        raise BrokenPipeError


out = _Terminal(highlight=False)
err = _Terminal(stderr=True, highlight=False)


Work = Callable[[], Awaitable[int]]
"""What a command does, in a loop; it returns the exit code."""


class _Interrupted(BaseException):
    def __init__(self, number: int) -> None:
        self.number = number


@click.group()
@click.version_option(package_name="turnmill")
@click.option("--verbose", "-v", is_flag=True, help="Say more.")
def cli(verbose: bool) -> None:
    """A durable queue of conversation turns in front of one inference engine."""
    handler: logging.Handler = logging.StreamHandler()  # a log file wants whole lines
    if err.is_terminal:
        handler = RichHandler(console=err, show_path=False, show_time=False, markup=False)
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(message)s", handlers=[handler]
    )


_redis_options = [
    click.option(
        "--redis-url", envvar="REDIS_URL", help="Without it: an embedded server. [REDIS_URL]"
    ),
    click.option("--namespace", envvar="TURNMILL_NAMESPACE", help="Prefix of all keys. [turnmill]"),
    click.option(
        "--data",
        type=click.Path(path_type=Path, file_okay=False),
        help="Folder of the embedded server. [TURNMILL_DATA, or the user's data directory]",
    ),
]

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


def _with(options: list[Any]) -> Callable[[Any], Any]:
    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


# turnmill run


@cli.command()
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
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
@click.option("--seed", type=int, help="Makes every draw repeatable.")
@click.option("--skip-bad", is_flag=True, help="Leave bad lines out instead of refusing the file.")
@click.option("--retry-failed", is_flag=True, help="Ask again also what failed for good.")
@click.option("--extend", is_flag=True, help="Take changed input or settings under the same name.")
@click.option("--json", "as_json", is_flag=True, help="The report as JSON on standard output.")
@_with(_sampling_options)
@_with(_redis_options)
@click.argument("engine_arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    file: Path,
    name: str,
    out: Path | None,
    model: str | None,
    engine: str | None,
    served_name: str | None,
    slots: int | None,
    concurrency: str,
    max_failures: str,
    seed: int | None,
    skip_bad: bool,
    retry_failed: bool,
    extend: bool,
    as_json: bool,
    redis_url: str | None,
    namespace: str | None,
    data: Path | None,
    engine_arguments: tuple[str, ...],
    **sampling: Any,
) -> None:
    """Drive the conversations of FILE; run again, go on where it stopped.

    FILE has a conversation a line, or MT-Bench's lines; - is standard input. Without a Redis, an embedded
    server and one worker are started; arguments after -- go to that worker's engine.
    """

    def prepare() -> Work:
        check_name(name, "run")
        settings = RunSettings(
            name=name,
            model="",
            sampling=_sampling(sampling),
            seed=seed,
            concurrency=_concurrency(concurrency),
            max_failures=FailureBudget.parse(max_failures),
            retry_failed=retry_failed,
            extend=extend,
        )
        loaded = read_conversations(file, skip_bad)
        for bad in loaded.bad:
            err.print(f"left out: {bad}", markup=False, soft_wrap=True)
        if redis_url and (engine or slots or engine_arguments):
            raise UsageError(
                "REDIS_URL is set: its workers are used, --engine and its arguments are not"
            )
        return lambda: work(settings, loaded.conversations)

    async def work(settings: RunSettings, conversations: Sequence[Conversation]) -> int:
        folder = out or Path("runs") / name
        async with contextlib.AsyncExitStack() as stack:
            files = stack.enter_context(RunFiles(folder, name))
            worker = None
            farm = await stack.enter_async_context(_farm(redis_url, namespace, data))
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
                    conversations,
                    multi_turn_chat,
                    client,
                    files,
                )
                end = await _show_while(a_run, name)
        return _report(end, folder, as_json)

    _execute(prepare)


def _report(end: RunEnd, folder: Path, as_json: bool) -> int:
    if as_json:
        _emit(end.report.model_dump_json())
    else:
        out.print(display.report_table(end))
        if not end.report.asked and not end.unfinished:
            out.print("Everything was answered from the store: nothing was asked again.")
        name = PARTIAL if end.unfinished else REPLIES
        out.print(f"{folder / name}, {folder / 'report.json'}", soft_wrap=True)
    failed = end.report.outcomes.failed
    if failed:
        err.print(
            f"{failed} conversations failed; each line's error says why. What failed for good is asked again "
            "with --retry-failed.",
            soft_wrap=True,
        )
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


@contextlib.asynccontextmanager
async def _farm(
    redis_url: str | None, namespace: str | None, data: Path | None
) -> AsyncIterator[Farm]:
    """The farm of a Redis; without one, that of an embedded server. Starting and ending a server takes its
    time: not in the loop, which has signals to hear."""
    if redis_url:
        yield Farm.from_environment(redis_url, namespace)
        return
    namespace = check_name(namespace or DEFAULT_NAMESPACE, "namespace")
    server = EmbeddedServer(data or default_data_dir())
    try:
        await asyncio.to_thread(server.start)
        yield Farm(server.url, namespace)
    finally:
        await asyncio.to_thread(server.close)


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


# turnmill replies


@cli.command()
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
            _emit(result.model_dump_json())
        return 0

    _execute(lambda: work)


# turnmill status


@cli.command()
@click.option("--json", "as_json", is_flag=True)
@_with(_redis_options)
def status(as_json: bool, redis_url: str | None, namespace: str | None, data: Path | None) -> None:
    """Queues, runs and workers."""

    async def work() -> int:
        async with (
            _farm(redis_url, namespace, data) as farm,
            Client(farm.url, namespace=farm.namespace, patience=5.0) as client,
        ):
            seen = await client.status()
        if as_json:
            _emit(seen.to_json())
        else:
            out.print(display.status_tables(seen))
        return 0

    _execute(lambda: work)


# turnmill worker


@cli.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def worker(arguments: tuple[str, ...]) -> None:
    """Run a worker: one engine, many turns at once. `turnmill worker --help` lists its options."""
    os.execv(sys.executable, [sys.executable, "-m", "turnmill_worker", *arguments])


# Ending


def _execute(prepare: Callable[[], Work]) -> NoReturn:
    """Run a command, and exit with its code or that of its error. What `prepare` does may block: the loop, and
    with it the handlers of signals, comes after."""
    # Shells start what runs in the background with SIGINT ignored; our loop hears it, so all of us does.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = asyncio.run(_interruptible(prepare()))
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except _Interrupted as interrupted:
        err.print("Interrupted. The same command goes on from here.")
        code = 128 + interrupted.number
    except BrokenPipeError:
        # Whoever read our output has read enough; Python would complain again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    except UsageError as error:
        code = _complain(error, USAGE)
    except RedisError as error:
        code = _complain(error if passes(error) else translate(error), PERMANENT)
    except (TurnmillError, OSError) as error:
        code = _complain(error, PERMANENT)
    sys.exit(code)


def _emit(line: str) -> None:
    """A line of JSON: UTF-8, whatever the terminal's encoding."""
    sys.stdout.buffer.write(line.encode() + b"\n")


def _complain(error: Exception, code: int) -> int:
    err.print(f"turnmill: {error}", markup=False, soft_wrap=True)
    return code


async def _interruptible(work: Work) -> int:
    """The command, ended in good order by SIGINT or SIGTERM. A second signal ends it at once."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work())
    received: list[int] = []

    def interrupt(number: int) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)
        task.cancel()
        # redis-py can swallow a cancellation; a cleanup that takes longer than this is cut short.
        loop.call_later(CLEANUP_SECONDS, task.cancel)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt, number)
    try:
        return await task
    except asyncio.CancelledError:
        if received:
            raise _Interrupted(received[0]) from None
        raise


def main() -> None:
    cli(prog_name="turnmill")
