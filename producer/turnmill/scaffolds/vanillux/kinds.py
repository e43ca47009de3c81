"""The kinds of sandboxes: Docker's containers, bubblewrap's, and none at all."""

from __future__ import annotations

import os
import platform
import re
import secrets
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

from turnmill.errors import UsageError
from turnmill.scaffolds.vanillux.sandbox import Launch

Name = Literal["docker", "bubblewrap", "local"]

_NOBODY: Final = 65534
_OWN, _WORK, _HOME = "/run/turnmill", "/work", "/home/agent"
_SYSTEM: Final = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_BASE: Final = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PAGER": "cat",
}
_MIB: Final = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Of one sandbox. `processes` at once; MiB of `memory`: of a container, else of each process; MiB of files in its
    folder for work, and as many in /tmp and in its home."""

    processes: int = 512
    memory: int = 4096
    space: int = 1024


class Kind(Protocol):
    """Where commands run. `launch` says how one is started for a task that names an image, or none."""

    @property
    def name(self) -> Name: ...

    def launch(self, image: str | None) -> Launch: ...


@dataclass(frozen=True)
class Bubblewrap:
    """A read-only view of this machine's system, folders in memory that only the sandbox sees, no network, no other
    processes. All of it is gone with its first process."""

    limits: Limits
    command: str = "bwrap"
    version: tuple[int, ...] = (0, 8)
    name: Literal["bubblewrap"] = "bubblewrap"

    @classmethod
    def found(cls, limits: Limits) -> Bubblewrap:
        """Raises UsageError if there is none, or it does not work here."""
        command = shutil.which("bwrap")
        if command is None:
            raise UsageError("bubblewrap: there is no bwrap on the PATH")
        version = _said([command, "--version"])
        if version is None or not (numbers := re.search(r"(\d+)\.(\d+)", version)):
            raise UsageError(f"bubblewrap: {command} does not run")
        kind = cls(limits, command, tuple(map(int, numbers.groups())))
        launch = kind.launch(None)
        try:
            tried = subprocess.run(
                [*launch.argv, "bash", "-c", "exit 0"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=20,
                user=launch.user,
                group=launch.user,
                extra_groups=None if launch.user is None else (),
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise UsageError(f"bubblewrap: {command}: {error}") from None
        if tried.returncode:
            raise UsageError(f"bubblewrap: it does not work here: {' '.join(tried.stderr.split())}")
        return kind

    def launch(self, image: str | None) -> Launch:
        space = self.limits.space * _MIB
        return Launch(
            [
                *(
                    self.command,
                    "--unshare-user",
                    "--unshare-all",
                    "--uid",
                    "1000",
                    "--gid",
                    "1000",
                ),
                *("--cap-drop", "ALL", "--die-with-parent", "--new-session", "--as-pid-1"),
                *("--hostname", "sandbox", "--clearenv"),
                *self._system(),
                *("--proc", "/proc", "--dev", "/dev"),
                *self._in_memory("/dev/shm", space),
                *self._in_memory("/tmp", space),
                *self._in_memory(_WORK, space),
                *self._in_memory("/home", space),
                *self._in_memory(_OWN, 16 * _MIB),
                *("--dir", _HOME, "--remount-ro", "/dev", "--remount-ro", "/"),
                *(("--disable-userns",) if self.version >= (0, 8) else ()),
                *(
                    part
                    for name, value in {**_BASE, "HOME": _HOME}.items()
                    for part in ("--setenv", name, value)
                ),
                *("--chdir", _WORK),
            ],
            _OWN,
            _WORK,
            self.limits.processes if _counts_by_namespace() else 0,
            self.limits.memory * 1024,
            # As root, what is in a sandbox would own this machine's files in the kernel's eyes, and have no limit of processes.
            user=_NOBODY if os.geteuid() == 0 else None,
        )

    def _system(self) -> list[str]:
        parts = ["--ro-bind", "/usr", "/usr", "--ro-bind", "/etc", "/etc"]
        for name in _SYSTEM:
            path = Path("/", name)
            if path.is_symlink():
                parts += ["--symlink", os.readlink(path), str(path)]
            elif path.is_dir():
                parts += ["--ro-bind", str(path), str(path)]
        return parts

    def _in_memory(self, path: str, size: int) -> list[str]:
        bound = ["--size", str(size)] if self.version >= (0, 8) else []
        return [*bound, "--tmpfs", path]


@dataclass(frozen=True)
class Docker:
    """A container of the task's image, or of the default one, without network; removed when it ends."""

    limits: Limits
    image: str
    name: Literal["docker"] = "docker"

    @classmethod
    def found(cls, limits: Limits, image: str) -> Docker:
        """Raises UsageError if no Docker answers."""
        if shutil.which("docker") is None:
            raise UsageError("docker: there is no docker on the PATH")
        if _said(["docker", "info", "--format", "{{.ServerVersion}}"]) is None:
            raise UsageError("docker: 'docker info' does not answer")
        return cls(limits, image)

    def launch(self, image: str | None) -> Launch:
        limits = self.limits
        folders = f"rw,exec,nosuid,nodev,mode=1777,size={limits.space}m"
        return Launch(
            [
                *("docker", "run", "--rm", "--interactive", "--quiet"),
                *("--name", f"turnmill-{secrets.token_hex(8)}", "--hostname", "sandbox"),
                *("--network", "none", "--security-opt", "no-new-privileges"),
                *("--pids-limit", str(limits.processes), "--memory", f"{limits.memory}m"),
                *("--tmpfs", f"{_WORK}:{folders}", "--tmpfs", f"{_OWN}:rw,mode=1777,size=16m"),
                *(part for n in ("LANG", "TERM", "PAGER") for part in ("--env", f"{n}={_BASE[n]}")),
                *("--workdir", _WORK, "--entrypoint", "", image or self.image),
            ],
            _OWN,
            _WORK,
            start_seconds=900,  # the image may have to be pulled
        )


@dataclass(frozen=True)
class Local:
    """No sandbox: a folder of its own, and all that the user may do."""

    limits: Limits
    name: Literal["local"] = "local"

    def launch(self, image: str | None) -> Launch:
        root = Path(tempfile.mkdtemp(prefix="turnmill-vanillux-"))
        own, work, home = root / "own", root / "work", root / "home"
        for folder in (own, work, home):
            folder.mkdir()
        environment = {**_BASE, "PATH": os.environ.get("PATH", _BASE["PATH"]), "HOME": str(home)}
        # Processes are not limited: the kernel would count all of the user's.
        return Launch(
            [],
            str(own),
            str(work),
            memory=self.limits.memory * 1024,
            root=str(root),
            environment=environment,
        )


def choose(
    wanted: Literal["auto", "docker", "bubblewrap", "local"],
    *,
    unsafe_local: bool,
    limits: Limits,
    image: str,
) -> Kind:
    """The kind that is wanted; `auto` is the first that works here. Raises UsageError if none does: what a model commands is
    run without a sandbox only where that was allowed."""
    if wanted == "docker":
        return Docker.found(limits, image)
    if wanted == "bubblewrap":
        return Bubblewrap.found(limits)
    if wanted == "local":
        if not unsafe_local:
            raise UsageError("without a sandbox, the model's commands may do all that you may: "
                             "--unsafe-local allows it")  # fmt: skip
        return Local(limits)
    missing = []
    for found in (lambda: Docker.found(limits, image), lambda: Bubblewrap.found(limits)):
        try:
            return found()
        except UsageError as error:
            missing.append(str(error))
    if unsafe_local:
        return Local(limits)
    raise UsageError(
        f"no sandbox for the model's commands ({'; '.join(missing)}): install bubblewrap; "
        "or --unsafe-local lets them do all that you may"
    )


def _said(command: list[str]) -> str | None:
    """What a command printed, if it went well."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def _counts_by_namespace() -> bool:
    """Since Linux 5.14, a limit of processes counts those of the sandbox alone, else all of the user's."""
    numbers = re.match(r"(\d+)\.(\d+)", platform.release())
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= (5, 14)
