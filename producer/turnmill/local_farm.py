"""A farm on this machine, for `turnmill run` without REDIS_URL: an embedded server and one worker
process. Both end with this process, in whatever way it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from turnmill.children import parent_death_signal
from turnmill.errors import UsageError
from turnmill.faults import patiently
from turnmill.files import writing
from turnmill.restarts import Pauses, how_it_ended
from turnmill.settings import Farm
from turnmill.store import BenchedWorker, Store, WorkerInfo

log = logging.getLogger("turnmill.local")

CONFIGURATION = 2
"""The worker's exit code when starting it again cannot help."""
DRAIN_SECONDS = 2.0
"""A run that is interrupted does not wait for long answers: they are asked again by the next attempt."""


class WorkerUnusable(UsageError):
    """The worker cannot be started as it is configured; the text is its own."""


@dataclass(frozen=True)
class WorkerCommand:
    """What `run` passes on to the worker that it starts."""

    engine: str
    model: str | None = None
    served_name: str | None = None
    slots: int | None = None
    engine_arguments: Sequence[str] = ()

    def line(self) -> list[str]:
        line = [sys.executable, "-m", "turnmill_worker", "--engine", self.engine]
        for option, value in (
            ("--model", self.model),
            ("--served-name", self.served_name),
            ("--slots", self.slots),
            ("--drain", DRAIN_SECONDS),
        ):
            if value is not None:
                line += [option, str(value)]
        return [*line, "--", *self.engine_arguments]


class WorkerProcess:
    """One worker on this machine, started again whenever it ends.

    Start it from the main thread: the kernel ends a child with the thread that started it.
    """

    def __init__(self, command: WorkerCommand, farm: Farm, log_file: Path) -> None:
        self._command, self._farm, self.log_file = command, farm, log_file
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {
            **os.environ,
            "REDIS_URL": self._farm.url,
            "TURNMILL_NAMESPACE": self._farm.namespace,
        }
        with writing(self.log_file):
            self.log_file.parent.mkdir(parents=True, exist_ok=True)
            with open(self.log_file, "ab") as output:
                self._process = subprocess.Popen(
                    self._command.line(),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C is for us; the worker is told in its turn
                    preexec_fn=parent_death_signal(),
                )

    async def served_model(self, store: Store) -> str:
        """The model name that turns have to ask for, once the worker says that it serves. Its adapters are not asked for."""
        said = False
        while True:
            workers = await patiently(store.workers, patience=None, doing="waiting for the worker")
            ours = [worker for worker in workers if self._is_ours(worker)]
            for worker in ours:
                if worker.engine.adapter is None:
                    return worker.model
            benched = await patiently(store.benched, patience=None, doing="waiting for the worker")
            for one in filter(self._is_ours, benched):
                if not said:
                    log.warning(
                        "the worker has crashed too often and waits for %.0f s before it tries again: %s. Its log: %s",
                        one.until - time.time(),
                        one.why,
                        self.log_file,
                    )
                said = True
            await asyncio.sleep(0.1)

    def _is_ours(self, worker: WorkerInfo | BenchedWorker) -> bool:
        pid = self._process.pid if self._process else None
        return worker.pid == pid and worker.host == socket.gethostname()

    async def keep_alive(self) -> None:
        """Start the worker again when it ends, ever more slowly if it keeps ending. Raises WorkerUnusable
        when its configuration is wrong."""
        pauses = Pauses()
        while True:
            started = asyncio.get_running_loop().time()
            code = await self._ended()
            if code == CONFIGURATION:
                raise WorkerUnusable(
                    f"{self.last_words()} (with REDIS_URL, workers elsewhere are used)"
                )
            pause = pauses.after(asyncio.get_running_loop().time() - started)
            log.warning(
                "the worker ended (%s): %s; it is started again in %g s. Its log: %s",
                how_it_ended(code),
                self.last_words(),
                pause,
                self.log_file,
            )
            await asyncio.sleep(pause)
            self.start()

    async def _ended(self) -> int:
        assert self._process is not None
        return await asyncio.to_thread(self._process.wait)

    def last_words(self) -> str:
        """The last line of the worker's log, without a full stop."""
        try:
            lines = self.log_file.read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        last = lines[-1] if lines else ""
        return last.removeprefix("turnmill worker: ").removeprefix("Error: ").rstrip(".")

    def stop(self) -> None:
        """Let it drain briefly, then end it."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(DRAIN_SECONDS + 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
