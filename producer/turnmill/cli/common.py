"""What the commands share: options, the farm that they use, and how they end.

Exit codes: 0 ended within its budget; 1 budget spent; 2 usage or input; 3 Redis or the configuration
refuses for good; 130, 143 interrupted, 143 also cancelled by another command: the same command goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

import click
from redis.exceptions import RedisError
from rich.console import Console

from turnmill.embedded import EmbeddedServer, default_data_dir
from turnmill.errors import TurnmillError, UsageError
from turnmill.faults import passes, translate
from turnmill.keys import DEFAULT_NAMESPACE
from turnmill.settings import Farm, check_name

BUDGET_SPENT, USAGE, PERMANENT = 1, 2, 3
CANCELLED = 128 + signal.SIGTERM
CLEANUP_SECONDS = 15.0


class _Terminal(Console):
    def on_broken_pipe(self) -> None:
        """Ours to handle: rich would exit with 1, which means something else here."""
        raise BrokenPipeError


# Names are anybody's: what looks like rich's markup or emoji in them (`base:a:b`) is neither.
terminal = _Terminal(highlight=False, markup=False, emoji=False)
err = _Terminal(stderr=True, highlight=False, markup=False, emoji=False)


Work = Callable[[], Awaitable[int]]
"""What a command does, in a loop; it returns the exit code."""


class _Interrupted(BaseException):
    def __init__(self, number: int) -> None:
        self.number = number


# Options

redis_options = [
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


def with_options(options: list[Any]) -> Callable[[Any], Any]:
    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


# The farm


@contextlib.asynccontextmanager
async def a_farm(
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


def say_how_to_join(farm: Farm) -> None:
    """For commands that start an embedded server, but no worker."""
    namespace = (
        "" if farm.namespace == DEFAULT_NAMESPACE else f" TURNMILL_NAMESPACE={farm.namespace}"
    )
    err.print(
        f"no REDIS_URL: an embedded server, which starts no worker. One joins with REDIS_URL={farm.url}{namespace}",
        soft_wrap=True,
    )


# Ending


def execute(prepare: Callable[[], Work]) -> NoReturn:
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


def emit(line: str) -> None:
    """A line of JSON: UTF-8, whatever the terminal's encoding."""
    sys.stdout.buffer.write(line.encode() + b"\n")


def _complain(error: Exception, code: int) -> int:
    err.print(f"turnmill: {error}", soft_wrap=True)
    return code


async def _interruptible(work: Work) -> int:
    """The command, ended in good order by SIGINT or SIGTERM. A second signal ends it at once."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work())
    received: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        if received or loop.is_closed():
            os._exit(128 + number)
        received.append(number)
        loop.call_soon_threadsafe(end)

    def end() -> None:
        task.cancel()
        # redis-py can swallow a cancellation; a cleanup that takes longer than this is cut short.
        loop.call_later(CLEANUP_SECONDS, task.cancel)

    # Not the loop's own handlers: a scaffold's code may hold the loop up, and a second signal is to end it all the same.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    try:
        return await task
    except asyncio.CancelledError:
        if received:
            raise _Interrupted(received[0]) from None
        raise
