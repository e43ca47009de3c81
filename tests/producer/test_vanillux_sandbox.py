"""Sandboxes: what a command leaves, what it may not do, and how it all ends. Every kind that there is here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from tests.processes import until, until_async
from tests.sandboxing import a_kind

from turnmill.errors import UsageError
from turnmill.scaffolds.vanillux.kinds import Limits, choose
from turnmill.scaffolds.vanillux.packing import Files, pack
from turnmill.scaffolds.vanillux.sandbox import _SERVER, Launch, Ran, Sandbox, SandboxDied, _spawn


class Box:
    """A sandbox with a short way to run something."""

    def __init__(self, sandbox: Sandbox, kind: str) -> None:
        self.sandbox, self.kind = sandbox, kind

    async def __call__(self, command: str, seconds: float = 20, most: int = 10_000) -> Ran:
        return await self.sandbox.run(command, seconds=seconds, most=most)

    async def prints(self, command: str) -> str:
        return (await self(command))["output"]


@contextlib.asynccontextmanager
async def boxed(kind: str, files: Files = None) -> AsyncIterator[Box]:
    there = a_kind(kind)
    async with Sandbox(lambda: there.launch(None), lambda: pack(files)) as sandbox:
        yield Box(sandbox, kind)


@pytest.fixture(params=["local", "bubblewrap", "docker"])
async def box(request: pytest.FixtureRequest) -> AsyncIterator[Box]:
    files = {"notes/today.txt": "grüße\n", "go": "#!/bin/sh\necho gone\n"}
    async with boxed(request.param, files) as made:
        yield made


@pytest.fixture
async def bubblewrap() -> AsyncIterator[Box]:
    async with boxed("bubblewrap") as made:
        yield made


def ran(output: str, exit: int = 0) -> Ran:
    return {"exit": exit, "output": output, "killed": None}


# What is kept between commands


async def test_folder_and_exports_are_kept(box: Box) -> None:
    assert await box("cat notes/today.txt; ./go") == ran("grüße\ngone\n")
    await box("cd notes; export SAID=\"it's a\n'day'\" PATH=$PATH:/more; plain=1; unset HOME")
    kept = await box.prints('echo "$SAID|$plain|$HOME|${PATH##*:}|${PWD##*/}"')
    assert kept == "it's a\n'day'|||/more|notes\n"
    # Another shell knows nothing of it.
    other = await box.sandbox.run('echo "$SAID|${PWD##*/}"', seconds=20, most=10_000, shell="check")
    assert other["output"] == "|work\n"


@pytest.mark.parametrize(
    ("command", "exit"),
    [
        ("exit 3", 3),
        ("kill -9 $$", 137),
        ("exec false", 1),
        ("set -e; false; echo never", 1),
        ("if", 2),
        ("trap 'exit 5' EXIT", 5),
        ("exec >&- 2>&-; exit 4", 4),
    ],
)
async def test_no_command_ends_the_sandbox(box: Box, command: str, exit: int) -> None:
    await box("cd notes; export KEPT=yes")
    assert (await box(command))["exit"] == exit
    assert await box.prints('echo "$KEPT ${PWD##*/}"') == "yes notes\n"


async def test_the_folder_before_is_kept(box: Box) -> None:
    await box("cd notes")
    assert (await box.prints("cd - > /dev/null; echo ${PWD##*/}")) == "work\n"
    assert (await box.prints("cd - > /dev/null; echo ${PWD##*/}")) == "notes\n"


async def test_what_is_kept_needs_nothing_of_the_command(box: Box) -> None:
    """Not its PATH, and not the functions it has defined."""
    await box("cd notes; export WAS=$PATH PATH=/nowhere; printf() { :; }; export() { :; }")
    assert await box.prints('echo "${PWD##*/} $PATH"; export PATH=$WAS') == "notes /nowhere\n"
    assert await box("cat today.txt") == ran("grüße\n")


async def test_a_folder_that_is_gone_is_left(box: Box) -> None:
    await box("mkdir deep && cd deep && rmdir ../deep")
    assert await box.prints("echo ${PWD##*/}") == "work\n"


async def test_a_long_command_with_anything_in_it(box: Box) -> None:
    text = "ä'\"$`\\\n" * 30_000
    written = await box(f"cat > long <<'THE END'\n{text}THE END\nwc -c < long")
    assert written == ran(f"{len(text.encode())}\n")


# Output


async def test_nothing_can_be_typed_into_a_command(box: Box) -> None:
    assert await box("cat; read x || echo end") == ran("end\n")


async def test_both_streams_in_their_order(box: Box) -> None:
    assert await box("echo a; echo b >&2; echo c; exit 2") == ran("a\nb\nc\n", 2)


async def test_output_has_names_too(box: Box) -> None:
    assert await box("echo a > /dev/stdout; echo b | tee /dev/stderr") == ran("a\nb\nb\n")


async def test_what_reads_its_own_output_is_refused(bubblewrap: Box) -> None:
    """Or it would read away the end of what follows."""
    await bubblewrap("tail -f /dev/stdout > /tmp/read & sleep 0.1")
    assert "Permission denied" in await bubblewrap.prints("cat /dev/stdout")
    assert await bubblewrap("echo on; cat /tmp/read") == ran("on\n")


async def test_long_and_binary_output_is_cut(box: Box) -> None:
    cut = await box.prints("seq 1000000")
    head, mark, tail = cut.partition("\n[... 6878896 characters left out ...]\n")
    assert mark
    assert (len(head), len(tail)) == (5000, 5000)
    assert head.startswith("1\n2\n")
    assert tail.endswith("\n1000000\n")
    assert await box.prints("printf 'a\\0b\\377c\\303'") == "a\ufffdb\ufffdc\ufffd"
    both = await box("printf '€%.0s' $(seq 3000)", most=2001)
    assert both["output"] == "€" * 1001 + "\n[... 999 characters left out ...]\n" + "€" * 1000


async def test_what_prints_without_end_is_killed(box: Box) -> None:
    flood = await box("yes")
    assert (flood["killed"], flood["exit"]) == ("output", 137)
    assert await box("echo on") == ran("on\n")


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        ("set -x; echo hi", "++ echo hi\nhi\n"),
        ("set -v; echo hi", "hi\n"),
        ("set -x; exit", "++ exit\n"),
        ("trap 'echo trapped' DEBUG; echo hi", "trapped\nhi\n"),
        ("trap 'echo bye >&2' EXIT; echo hi", "hi\nbye\n"),
        ("--help", "--help: command not found\n"),
    ],
)
async def test_only_the_command_is_seen(bubblewrap: Box, command: str, printed: str) -> None:
    """Nothing of the shell that runs it: or who traces a command could not submit in it."""
    assert (await bubblewrap.prints(command)).endswith(printed)
    assert "vanillux" not in await bubblewrap.prints(command)


@pytest.mark.parametrize("command", ["echo 'open", "echo $(", "}", "cat <<'END'\nopen"])
async def test_what_is_left_open_is_an_error_of_one_command(box: Box, command: str) -> None:
    assert "END" in command or (await box(command))["exit"] == 2
    assert "vanillux" not in await box.prints(command)
    assert await box("echo on") == ran("on\n")


# Time, and what is left running


async def test_a_command_is_killed_with_its_children(box: Box) -> None:
    command = "sleep 987 & sleep 987 | sleep 987; echo never"
    killed = await box(f"echo begun; {command}", seconds=0.5)
    assert killed == {"exit": 137, "output": "begun\n", "killed": "time"}
    count = "grep -czs '^987$' /proc/[0-9]*/cmdline | grep -c ':1$'"
    if box.kind != "local":  # the machine may have such processes of others
        assert await box.prints(count) == "0\n"


async def test_a_command_that_stops_itself_is_killed(box: Box) -> None:
    assert (await box("kill -STOP $$", seconds=0.5))["killed"] == "time"
    assert await box("echo on") == ran("on\n")


async def test_what_is_left_behind_goes_on_and_disturbs_nothing(box: Box) -> None:
    server = "while sleep 0.05; do echo noise; echo x >> served; done"
    assert (await box(f"{{ {server}; }} & echo started"))["output"].startswith("started\n")
    await until_async(lambda: _has_lines(box, "served", 3), "it serves")
    assert (await box("exit 6"))["exit"] == 6


async def _has_lines(box: Box, file: str, count: int) -> bool:
    return (await box(f'[ "$(cat {file} | wc -l)" -ge {count} ]'))["exit"] == 0


# Nobody gets out


async def test_the_system_is_there_but_is_not_written(bubblewrap: Box) -> None:
    for path in ("/usr/x", "/etc/x", "/x", "/dev/x", "/proc/sys/kernel/panic", "/sys/x"):
        assert (await bubblewrap(f"echo 1 > {path}"))["exit"] != 0, path
    for path in ("/tmp/x", "/work/x", "$HOME/x", "/dev/shm/x"):
        assert await bubblewrap(f"echo 1 > {path} && cat {path}") == ran("1\n"), path


async def test_the_user_and_other_processes_are_not_seen(
    bubblewrap: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "geheim")
    secret = tmp_path / "secret"
    secret.write_text("geheim")
    async with boxed("bubblewrap") as box:
        for look in (
            f"cat {secret}",
            "cat /etc/shadow",
            f"ls {Path.home()}",
            f"kill {os.getpid()}",
        ):
            assert (await box(look))["exit"] != 0, look
        assert "geheim" not in await box.prints("env; cat /proc/*/environ")
        assert await box.prints("cat /proc/net/dev | grep -vc lo:") == "2\n"
        assert int(await box.prints("ls -d /proc/[0-9]* | wc -l")) < 10


async def test_no_right_is_left(bubblewrap: Box) -> None:
    status = await bubblewrap.prints("grep -E '^(Cap(Prm|Eff|Bnd)|NoNewPrivs)' /proc/self/status")
    zero = "\t" + "0" * 16 + "\n"
    assert status == f"CapPrm:{zero}CapEff:{zero}CapBnd:{zero}NoNewPrivs:\t1\n"


async def test_all_processes_killed_from_inside(bubblewrap: Box) -> None:
    await bubblewrap("export KEPT=yes; sleep 986 &")
    assert (await bubblewrap("kill -9 -1"))["exit"] in (0, 137)
    assert await bubblewrap("echo $KEPT") == ran("yes\n")


async def test_limits(bubblewrap: Box) -> None:
    full = await bubblewrap("head -c 20M /dev/zero > big")
    assert "No space left" in full["output"]
    assert await bubblewrap("rm big; echo ok > small && cat small") == ran("ok\n")
    assert "MemoryError" in await bubblewrap.prints("python3 -c 'bytearray(600 << 20)'")
    bomb = await bubblewrap(":() { : | : & }; : ; sleep 0.2", seconds=15)
    assert "Resource temporarily unavailable" in bomb["output"] or bomb["exit"]
    await bubblewrap("kill -9 -1")
    assert await bubblewrap("echo alive") == ran("alive\n")


# The end


@pytest.mark.parametrize("kind", ["local", "bubblewrap"])
async def test_all_ends_with_the_sandbox(kind: str) -> None:
    before = set(_ours())
    async with boxed(kind) as box:
        await box("sleep 985 & setsid sleep 985 > /dev/null 2>&1 &")
        started = set(_ours()) - before
        assert started
    assert not set(_ours()) & started
    await box.sandbox.close()


@pytest.mark.parametrize("kind", ["local", "bubblewrap"])
async def test_all_ends_with_a_conversation_that_is_cancelled(kind: str) -> None:
    before = set(_ours())

    async def converse() -> None:
        async with boxed(kind) as box:
            await box("setsid sleep 984 & sleep 984")

    task = asyncio.create_task(converse())
    await until_async(lambda: _grew(before), "something runs")
    started = set(_ours()) - before
    while not task.done():  # whoever ends a run does not tire of saying so
        task.cancel()
        await asyncio.wait({task}, timeout=0.05)
    assert task.cancelled()
    assert not set(_ours()) & started


async def _grew(before: set[psutil.Process]) -> bool:
    return any(process.name() == "sleep" for process in set(_ours()) - before)


def _ours() -> list[psutil.Process]:
    """Processes that a sandbox of the tests here has started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.name() == "sleep" and process.cmdline()[1:] in (["985"], ["984"]):
                found.append(process)
    return found


IN_A_PROCESS = """
import asyncio, sys, tempfile
from tests.sandboxing import a_kind
from turnmill.scaffolds.vanillux.packing import pack
from turnmill.scaffolds.vanillux.sandbox import Sandbox

async def main():
    kind = a_kind(sys.argv[1])
    tempfile.tempdir = sys.argv[2]
    sandbox = Sandbox(lambda: kind.launch(None), lambda: pack(None))
    await sandbox.run("setsid sleep 983 > /dev/null 2>&1 & echo", seconds=9, most=9)
    print("ready", flush=True)
    await sandbox.run("sleep 983", seconds=900, most=9)

asyncio.run(main())
"""


def test_half_a_command_is_not_run(tmp_path: Path) -> None:
    """A producer may die while it writes a command that does not fit into a pipe."""
    launch = a_kind("local").launch(None)
    process = _spawn(launch)
    server = f"set -- {launch.folder} {launch.work} ID 0 0 {launch.root}\n".encode() + _SERVER
    half = f"run 1 1000 agent\necho > {tmp_path}/begun\n".encode()
    heard, _ = process.communicate(b"%d\n" % len(server) + server + half, timeout=20)
    assert heard == b"\nID begin\n\nID 0\n"
    assert not (tmp_path / "begun").exists()
    assert not Path(launch.root).exists()


async def test_many_at_once_need_few_files_and_no_threads() -> None:
    kind, many = a_kind("bubblewrap"), 60
    starting, all_run = asyncio.Semaphore(8), asyncio.Barrier(many)

    async def use(number: int) -> str:
        async with Sandbox(lambda: kind.launch(None), lambda: pack(None), starting) as sandbox:
            await sandbox.run(f"echo {number} > it", seconds=60, most=100)
            await all_run.wait()
            used.append((psutil.Process().num_fds(), threading.active_count()))
            return (await sandbox.run("cat it; ulimit -n", seconds=60, most=100))["output"]

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    files, threads = psutil.Process().num_fds(), threading.active_count()
    used: list[tuple[int, int]] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (files + many, limits[1]))
    try:
        said = await asyncio.gather(*map(use, range(many)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert said == [f"{number}\n1024\n" for number in range(many)]
    assert max(used)[0] <= files + 2 * many + 8
    assert max(count for _, count in used) <= threads + 32, "as many as asyncio has for all"
    assert psutil.Process().num_fds() <= files + 8


@pytest.mark.parametrize("kind", ["local", "bubblewrap"])
def test_nothing_is_left_of_a_producer_that_is_killed(kind: str, tmp_path: Path) -> None:
    a_kind(kind)
    producer = subprocess.Popen(
        [sys.executable, "-c", IN_A_PROCESS, kind, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert producer.stdout is not None
    assert producer.stdout.readline() == b"ready\n"
    assert bool(list(tmp_path.iterdir())) == (kind == "local")
    inside = psutil.Process(producer.pid).children(recursive=True)
    assert inside
    producer.send_signal(signal.SIGKILL)
    producer.communicate()
    until(lambda: not any(process.is_running() for process in inside), "they end")
    until(lambda: not list(tmp_path.glob("turnmill-vanillux-*")), "its folder is gone")


# What does not work


async def test_a_sandbox_that_cannot_be_started() -> None:
    for argv, says in (
        (["/nowhere/bwrap"], "cannot be started"),
        (["sh", "-c", "echo no luck >&2; exit 7"], "exit code 7: no luck"),
    ):
        launch = Launch(argv, "/tmp", "/tmp")
        async with Sandbox(lambda launch=launch: launch, lambda: pack(None)) as sandbox:
            with pytest.raises(SandboxDied, match=says):
                await sandbox.run("echo", seconds=9, most=9)


async def test_a_sandbox_that_is_killed() -> None:
    async with boxed("bubblewrap") as box:
        await box("echo")
        asyncio.get_running_loop().call_later(0.2, _kill_children)
        with pytest.raises(SandboxDied, match="has ended with exit code"):
            await box("sleep 60", seconds=50)


def _kill_children() -> None:
    for child in psutil.Process().children():
        if child.name() == "bwrap":
            child.kill()


@pytest.fixture
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("nothing_installed")
def test_without_a_sandbox_it_is_refused() -> None:
    def chosen(wanted: str, unsafe: bool = False) -> str:
        return choose(wanted, unsafe_local=unsafe, limits=Limits(), image="x").name  # type: ignore[arg-type]

    with pytest.raises(UsageError, match=r"no docker .*no bwrap .*install .*--unsafe-local"):
        chosen("auto")
    with pytest.raises(UsageError, match="no bwrap on the PATH"):
        chosen("bubblewrap", unsafe=True)
    with pytest.raises(UsageError, match="no docker on the PATH"):
        chosen("docker", unsafe=True)
    with pytest.raises(UsageError, match="--unsafe-local allows it"):
        chosen("local")
    assert chosen("auto", unsafe=True) == "local"


def test_a_bubblewrap_that_does_not_work_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="tm"))
    folder.chmod(0o755)
    try:
        script = folder / "bwrap"
        said = "#!/bin/sh\ncase $1 in --version) echo bubblewrap 0.8.0;; *) echo No rights >&2; exit 1;; esac"
        script.write_text(said)
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        with pytest.raises(UsageError, match="bubblewrap: it does not work here: No rights"):
            choose("bubblewrap", unsafe_local=False, limits=Limits(), image="x")
    finally:
        shutil.rmtree(folder)
