"""A sandbox: a bash in a place of its own, which runs one command after the other.

What the place is, is its kind's business (kinds.py): this is the talk with server.sh, which runs inside it. A sandbox lives as long
as the pipe to it, so it ends with its process, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypedDict

from turnmill.scaffolds.vanillux.observation import Observation
from turnmill.tasks import end_tasks

_SERVER = Path(__file__).with_name("server.sh").read_bytes()
_BEGIN = b'read -r bytes && IFS= read -r -N "$bytes" code && eval "$code"'
_CHUNK = 1 << 16
_MOST_OUTPUT = 64 << 20
"""Bytes that a command may print; one that prints more is killed."""
_PATIENCE = 20.0
"""Seconds that the server may take for what is no command, and to end."""
_SLOWEST = 1 << 20
"""Bytes a second in which files are unpacked at the least."""


class SandboxDied(Exception):
    """A sandbox could not be started, or is gone; the text says what is known."""


class Ran(TypedDict):
    """How a command ended. `output`: standard output and error as they came, cut. `killed`: what for, if it was."""

    exit: int
    output: str
    killed: Literal["time", "output"] | None


@dataclass(frozen=True)
class Launch:
    """How a sandbox is started: `argv`, with the command line of a bash behind it, in `environment` (None: this process's own).

    `folder` and `work`, which are there then, are for server.sh and for commands; `processes` and `memory` (KiB each) are limits that
    the server sets on commands (0: none). `root`: a folder that is removed at the end, after all that was started from it.
    `before` is called in the child before it becomes the sandbox.
    """

    argv: list[str]
    folder: str
    work: str
    processes: int = 0
    memory: int = 0
    root: str = ""
    environment: Mapping[str, str] | None = None
    start_seconds: float = _PATIENCE
    before: Callable[[], None] | None = None


class _Exchange:
    """What the server answers to one request: its output goes to `seen`, and `ended` is its exit code. `too_much` is called once it
    has printed more than a command may."""

    def __init__(self, seen: Observation, too_much: Callable[[], None]) -> None:
        self.id = secrets.token_hex(16)
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._seen, self._too_much, self._size = seen, too_much, 0
        self._begin = f"\n{self.id} begin\n".encode()
        self._end = re.compile(rf"\n{self.id} (\d{{1,3}})\n".encode())
        self._begun, self._kept = False, b""

    def feed(self, data: bytes) -> None:
        data = self._kept + data
        if not self._begun:  # until then it is of a process that an earlier command left behind
            _, mark, after = data.partition(self._begin)
            self._begun = bool(mark)
            data = after if mark else data
        if self._begun and (end := self._end.search(data)):
            self._seen.feed(data[: end.start()], final=True)
            self.ended.set_result(int(end[1]))
            return
        # A mark may come in two pieces.
        rest = max(0, len(data) - len(self._begin))
        self._kept = data[rest:]
        if self._begun:
            self._seen.feed(data[:rest])
            before, self._size = self._size, self._size + rest
            if before <= _MOST_OUTPUT < self._size:
                self._too_much()


class Sandbox:
    """One sandbox, started when it is first needed, with `files` (a tar file) in its folder for work.

    Close it, or leave `async with`: then it ends with all that runs in it. Every method raises SandboxDied.
    """

    def __init__(self, launch: Callable[[], Launch], files: Callable[[], bytes]) -> None:
        self._launch, self._files = launch, files
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[str] | None = None
        self._exchange: _Exchange | None = None
        self._root = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(self, command: str, *, seconds: float, most: int, shell: str = "agent") -> Ran:
        """Run a command, for so many seconds at most, and see at most so many characters of it. Commands of one `shell`
        (letters) see what the others before them exported, and where they went."""
        await self._ready()
        killed: Literal["time", "output"] | None = None

        def kill(what_for: Literal["time", "output"]) -> None:
            nonlocal killed
            killed = killed or what_for
            self._write(b"\n")

        seen = Observation(most)
        exchange = _Exchange(seen, lambda: kill("output"))
        text = command.encode()
        self._begin(exchange, f"run {exchange.id} {len(text)} {shell}\n".encode() + text)
        if not await self._has_ended(exchange, seconds):
            kill("time")
        code = await self._end(exchange, _PATIENCE)
        return {"exit": code, "output": seen.text, "killed": killed}

    async def put(self, files: bytes) -> None:
        """Unpack a tar file in the folder for work."""
        await self._ready()
        await self._unpack(files)

    async def close(self) -> None:
        """May be called twice. A cancellation waits until all has ended, for the loop may end next."""
        closing = asyncio.ensure_future(self._close())
        cancelled: asyncio.CancelledError | None = None
        while not closing.done():
            try:
                await asyncio.wait({closing})
            except asyncio.CancelledError as error:
                cancelled = error
        closing.result()
        if cancelled:
            raise cancelled

    async def _ready(self) -> None:
        if self._process is not None:
            return
        files = await asyncio.to_thread(self._files)
        launch = self._launch()
        self._root = launch.root
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *launch.argv,
                *("bash", "--noprofile", "--norc", "-c", _BEGIN, "sandbox"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=launch.environment,
                start_new_session=True,  # an interrupt at the terminal is not for it
                preexec_fn=launch.before,
            )
        except OSError as error:
            raise SandboxDied(f"the sandbox cannot be started: {error}") from None
        self._listening = asyncio.create_task(self._listen(process))
        exchange = _Exchange(Observation(0), lambda: None)
        arguments = (
            launch.folder,
            launch.work,
            exchange.id,
            str(launch.processes),
            str(launch.memory),
            launch.root,
        )
        code = b"set -- " + shlex.join(arguments).encode() + b"\n" + _SERVER
        self._begin(exchange, b"%d\n" % len(code) + code)
        await self._end(exchange, launch.start_seconds)
        await self._unpack(files)

    async def _unpack(self, files: bytes) -> None:
        seen = Observation(1000)
        exchange = _Exchange(seen, lambda: None)
        self._begin(exchange, f"put {exchange.id} {len(files)}\n".encode() + files)
        if await self._end(exchange, _PATIENCE + len(files) / _SLOWEST):
            raise SandboxDied(f"the files of the task cannot be unpacked: {seen.text.strip()}")

    def _begin(self, exchange: _Exchange, request: bytes) -> None:
        self._exchange = exchange
        self._write(request)

    async def _end(self, exchange: _Exchange, seconds: float) -> int:
        assert self._listening is not None
        if not await self._has_ended(exchange, seconds):
            raise SandboxDied(f"the sandbox has not answered for {seconds:.0f} s")
        if exchange.ended.done():
            return exchange.ended.result()
        raise SandboxDied(self._listening.result())

    async def _has_ended(self, exchange: _Exchange, seconds: float) -> bool:
        """Whether the exchange has ended within so many seconds, or the sandbox has."""
        assert self._listening is not None
        ends: set[asyncio.Future[Any]] = {exchange.ended, self._listening}
        done, _ = await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)

    def _write(self, data: bytes) -> None:
        """What is written to a process that has ended is lost, and its end is told by what it no longer says."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(data)

    async def _listen(self, process: asyncio.subprocess.Process) -> str:
        """Read all that comes, also between commands, for processes that were left behind must not wait for a
        reader. Returns why nothing comes any more."""
        assert process.stdout is not None
        assert process.stderr is not None
        while chunk := await process.stdout.read(_CHUNK):
            if self._exchange is not None:
                self._exchange.feed(chunk)
        said = (await process.stderr.read(_CHUNK)).decode(errors="replace").strip()
        code = await process.wait()
        return f"the sandbox has ended with exit code {code}: {said or 'it said nothing'}"

    async def _close(self) -> None:
        process, listening = self._process, self._listening
        if process is not None and listening is not None:
            assert process.stdin is not None
            process.stdin.close()
            await asyncio.wait({listening}, timeout=_PATIENCE)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            await end_tasks([listening])
        if self._root:
            await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)
