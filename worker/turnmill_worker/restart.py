"""`turnmill worker --restart`: a small process that starts the worker again when it dies.

It holds no engine, so that nothing which kills one can kill it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence

from turnmill.children import parent_death_signal
from turnmill.restarts import Pauses, how_it_ended

log = logging.getLogger("turnmill.worker")

OPTION = "--restart"
FINAL = (0, 2)
"""Exit codes after which starting again is not wanted (drained), or cannot help (configuration)."""
_STOP = (signal.SIGTERM, signal.SIGINT)


def the_worker(arguments: Sequence[str]) -> list[str]:
    """The command line of the worker itself. `arguments`: those that this process was started with."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own = [argument for argument in arguments[:end] if argument != OPTION]
    return [sys.executable, "-m", "turnmill_worker", *own, *arguments[end:]]


def supervise(command: Sequence[str]) -> int:
    """Run a worker, again and again until it ends for good. Returns its exit code; 128 + N for a signal that
    killed it while it was to end. Raises UsageError where children cannot be bound to their parent."""
    return asyncio.run(_Supervisor(command).run())


class _Supervisor:
    """SIGTERM and SIGINT are the worker's, each as often as it comes here."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._child: asyncio.subprocess.Process | None = None
        self._unheard: list[signal.Signals] = []
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in _STOP:
            loop.add_signal_handler(number, self._stop, number)
        pauses = Pauses()
        while True:
            started = loop.time()
            code = await self._run_child()
            if code in FINAL or self._stopping.is_set():
                return _exit_code(code)
            pause = pauses.after(loop.time() - started)
            log.warning(
                "the worker ended (%s); it is started again in %g s", how_it_ended(code), pause
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
                return 0

    def _stop(self, number: signal.Signals) -> None:
        self._stopping.set()
        self._unheard.append(number)
        self._tell_child()

    def _tell_child(self) -> None:
        while self._child is not None and self._unheard:
            # Not the process's own `send_signal`: it may reap the child before who waits for its exit code.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, self._unheard.pop(0))

    async def _run_child(self) -> int:
        child = await asyncio.create_subprocess_exec(
            *self._command,
            # Ctrl-C is for us; the worker is told in its turn. And what is left of it can be found.
            start_new_session=True,
            preexec_fn=parent_death_signal(),
        )
        self._child = child
        self._tell_child()
        code = await child.wait()
        self._child = None
        # Processes of a dead engine would hold the GPU that the next one needs.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        return code


def _exit_code(code: int) -> int:
    if -code in _STOP:  # before it could hear signals, so it held nothing
        return 0
    return code if code >= 0 else 128 - code
