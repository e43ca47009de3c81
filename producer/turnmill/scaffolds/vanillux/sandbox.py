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
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self, TypedDict

from turnmill.open_files import allow_many_files
from turnmill.scaffolds.vanillux.observation import Observation

_SERVER: Final = Path(__file__).with_name("server.sh").read_bytes()
_BEGIN: Final = b'read -r bytes && IFS= read -r -N "$bytes" code && eval "$code"'
_MOST_OUTPUT: Final = 64 << 20
"""Bytes that a command may print; one that prints more is killed."""
_PATIENCE: Final = 60.0
"""Seconds that the server may take for what is no command: hundreds of them may share a few cores."""
_END_SECONDS: Final = 10.0
"""Seconds that it may take to end by itself."""
_SLOWEST: Final = 1 << 20
"""Bytes a second in which files are unpacked at the least."""
_SAID: Final = 1000
"""Bytes that are kept of what a sandbox says instead of starting."""


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
    `user`: the number of the user and the group that it is started as (None: our own).
    """

    argv: list[str]
    folder: str
    work: str
    processes: int = 0
    memory: int = 0
    root: str = ""
    environment: Mapping[str, str] | None = None
    start_seconds: float = _PATIENCE
    user: int | None = None


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


class _Ears(asyncio.Protocol):
    """Hears all that comes, also between commands, for processes that were left behind must not wait for a reader."""

    def __init__(self, hear: Callable[[bytes], None]) -> None:
        self._hear = hear
        self._pipe: asyncio.BaseTransport | None = None
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when nothing more will come."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._pipe = transport

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()

    def data_received(self, data: bytes) -> None:
        self._hear(data)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.gone.done():
            self.gone.set_result(None)


class Sandbox:
    """One sandbox, started when it is first needed, with `files` (a tar file) in its folder for work. `starting` bounds how many
    start at once.

    Close it, or leave `async with`: then it ends with all that runs in it. Every method raises SandboxDied. It has two
    open files and no thread.
    """

    def __init__(
        self,
        launch: Callable[[], Launch],
        files: Callable[[], bytes],
        starting: asyncio.Semaphore | None = None,
    ) -> None:
        self._launch, self._files = launch, files
        self._starting = starting or asyncio.Semaphore()
        self._process: subprocess.Popen[bytes] | None = None
        self._ears = _Ears(self._hear)
        self._voice: asyncio.WriteTransport | None = None
        self._exchange: _Exchange | None = None
        self._said = b""
        self._root = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(self, command: str, *, seconds: float, most: int, shell: str = "agent") -> Ran:
        """Run a command, for so many seconds at most, and see at most so many characters of it. Commands of one `shell`
        (letters) see what the others before them exported, and where they went."""
        await self.ready()
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

    async def put(self, files: bytes) -> Ran:
        """Unpack a tar file in the folder for work, over what is there."""
        await self.ready()
        return await self._unpack(files)

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

    async def ready(self) -> None:
        """Start it, if it has not been. Raises SandboxDied, as all that needs one does."""
        if self._process is not None:
            return
        async with self._starting:
            files = await asyncio.to_thread(self._files)
            await self._start()
            unpacked = await self._unpack(files)
        if unpacked["exit"]:
            said = unpacked["output"].strip()
            raise SandboxDied(f"the files of the task cannot be unpacked: {said}")

    async def _start(self) -> None:
        allow_many_files()
        try:
            launch = self._launch()
            self._root = launch.root
            self._process = process = _spawn(launch)
        except OSError as error:
            raise SandboxDied(f"the sandbox cannot be started: {error}") from None
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: self._ears, process.stdout)
        self._voice, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
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
        self._said = b""

    async def _unpack(self, files: bytes) -> Ran:
        seen = Observation(1000)
        exchange = _Exchange(seen, lambda: None)
        self._begin(exchange, f"put {exchange.id} {len(files)}\n".encode() + files)
        code = await self._end(exchange, _PATIENCE + len(files) / _SLOWEST)
        return {"exit": code, "output": seen.text, "killed": None}

    def _begin(self, exchange: _Exchange, request: bytes) -> None:
        self._exchange = exchange
        self._write(request)

    async def _end(self, exchange: _Exchange, seconds: float) -> int:
        if not await self._has_ended(exchange, seconds):
            raise SandboxDied(f"the sandbox has not answered for {seconds:.0f} s")
        if exchange.ended.done():
            return exchange.ended.result()
        said = self._said.decode(errors="replace").strip()
        code = await self._exit_code()
        raise SandboxDied(f"the sandbox has ended with exit code {code}{said and f': {said}'}")

    async def _has_ended(self, exchange: _Exchange, seconds: float) -> bool:
        """Whether the exchange has ended within so many seconds, or the sandbox has."""
        ends: set[asyncio.Future[Any]] = {exchange.ended, self._ears.gone}
        done, _ = await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)

    async def _exit_code(self) -> int | None:
        """Of a process that is about to end; None if it does not."""
        assert self._process is not None
        try:
            return await asyncio.to_thread(self._process.wait, _END_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def _write(self, data: bytes) -> None:
        """What is written to a process that has ended is lost, and its end is told by what it no longer says."""
        assert self._voice is not None
        if not self._voice.is_closing():
            self._voice.write(data)

    def _hear(self, data: bytes) -> None:
        self._said += data[: _SAID - len(self._said)]
        if self._exchange is not None and not self._exchange.ended.done():
            self._exchange.feed(data)

    async def _close(self) -> None:
        process = self._process
        if process is not None:
            if self._voice is not None:
                if not self._voice.is_closing():
                    self._voice.abort()  # what it has not read yet, it need not read
                await asyncio.wait({self._ears.gone}, timeout=_END_SECONDS)
            if process.returncode is None:  # else its number may be another's
                os.killpg(process.pid, signal.SIGKILL)
            await self._exit_code()
            self._ears.close()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
        if self._root:
            await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)


def _spawn(launch: Launch) -> subprocess.Popen[bytes]:
    """Not asyncio's way, which has a thread for each process before Python 3.12. And not in a thread: bubblewrap ends with the
    thread that has started it."""
    process = subprocess.Popen(
        [*launch.argv, "bash", "--noprofile", "--norc", "-c", _BEGIN, "sandbox"],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=launch.environment,
        start_new_session=True,  # an interrupt at the terminal is not for it
        user=launch.user,
        group=launch.user,
        extra_groups=None if launch.user is None else (),
    )
    assert process.stdout is not None
    if launch.user is not None:  # who writes to /dev/stdout opens the pipe again, as its owner
        os.fchown(process.stdout.fileno(), launch.user, launch.user)
    with contextlib.suppress(OSError):  # where pipes have modes: nobody reads away what is for us
        os.fchmod(process.stdout.fileno(), 0o200)
    return process
