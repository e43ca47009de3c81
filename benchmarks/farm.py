"""A server of its own for each measurement, and real processes around it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import redis

from turnmill.children import parent_death_signal
from turnmill.embedded import EmbeddedServer
from turnmill.keys import Keys
from turnmill.settings import Farm

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 60.0


@contextmanager
def server(copy_of: Path | None = None) -> Iterator[EmbeddedServer]:
    """A new server with AOF on, the one that `turnmill run` embeds: empty, or with a copy of the data in a
    folder."""
    with tempfile.TemporaryDirectory(prefix="turnmill-bench-") as folder:
        if copy_of is not None:
            shutil.copytree(copy_of, folder, dirs_exist_ok=True)
        with EmbeddedServer(Path(folder)) as embedded:
            yield embedded


def server_version() -> str:
    with server() as embedded, redis.Redis.from_url(embedded.url) as client:
        info = client.info("server")
    assert isinstance(info, dict)
    return f"{info.get('server_name', 'redis')} {info.get('valkey_version', info['redis_version'])}"


@contextmanager
def process(
    command: Sequence[str | Path], environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with this block. What it says is shown if it ends before, with an error."""
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=parent_death_signal(),
        )
        try:
            yield child
        except Exception as error:
            output.seek(0)
            error.add_note(f"{command[0]} said: {output.read()[-2000:].decode(errors='replace')}")
            raise
        finally:
            child.terminate()
            try:
                child.wait(5)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def worker_command(slots: int, *engine_arguments: str) -> list[str]:
    """A real worker process with the scripted engine."""
    line = [sys.executable, "-m", "turnmill_worker", "--engine", "sim", "--slots", str(slots)]
    return [*line, "--", *engine_arguments]


def farm_environment(farm: Farm) -> dict[str, str]:
    return {"REDIS_URL": farm.url, "TURNMILL_NAMESPACE": farm.namespace}


def wait_for(
    ready: Callable[[], bool],
    *children: subprocess.Popen[bytes],
    seconds: float = START_SECONDS,
    pause: float = 0.02,
) -> None:
    """Wait for a state of the server that processes bring about."""
    deadline = time.monotonic() + seconds
    while not ready():
        for child in children:
            if child.poll() is not None:
                raise RuntimeError(f"a process ended with {child.returncode}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"not done in {seconds:g} s")
        time.sleep(pause)


def finish_times(client: redis.Redis, model: str, keys: Keys | None = None) -> list[float]:
    """When each turn was stored: the server's clock, in seconds, from the stream of finished turns."""
    entries = client.xrange((keys or Keys()).finished(model))
    assert isinstance(entries, list)
    return [int(entry[0].partition(b"-")[0]) / 1000 for entry in entries]


def socket_path(on: EmbeddedServer) -> str:
    return on.url.removeprefix("unix://")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
