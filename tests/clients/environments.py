"""Environments of their own for clients of other makers, under `.venvs/`: their pins are nobody else's business."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent
INSTALL_SECONDS = 600


def python_of(name: str, version: tuple[int, int] = (3, 11)) -> Path:
    """The Python of an environment with what `NAME/requirements.txt` lists, where ROOT is turnmill; this Python's, or
    the next newer one of `version` or later. It is made anew when that file changes."""
    wanted = (HERE / name / "requirements.txt").read_text().replace("ROOT", str(ROOT))
    folder = ROOT / ".venvs" / "clients" / name
    python, made = folder / "bin" / "python", folder / "made-of"
    if not made.exists() or made.read_text() != wanted:
        subprocess.run([_interpreter(version), "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        install = [*pip, "install", "--no-compile"]  # most of it is never imported
        for line in wanted.splitlines():
            if line.startswith("--no-deps "):  # pip takes this for all of a file, or for nothing
                subprocess.run([*install, *line.split()], check=True, timeout=INSTALL_SECONDS)
        plain = [line for line in wanted.splitlines() if not line.startswith(("--no-deps ", "#"))]
        words = [word for line in plain for word in line.split()]
        subprocess.run([*install, *words], check=True, timeout=INSTALL_SECONDS)
        made.write_text(wanted)
    return python


def _interpreter(version: tuple[int, int]) -> str:
    if sys.version_info >= version:
        return sys.executable
    major, minor = version
    names = [f"python{major}.{newer}" for newer in range(minor, minor + 4)]
    found = [path for name in names if (path := shutil.which(name))]
    found += map(str, sorted(Path.home().glob(f".pyenv/versions/{major}.{minor}*/bin/python")))
    for path in found:
        # pyenv has a command for each version that it knows of, which may not be there.
        if subprocess.run([path, "-c", ""], check=False, capture_output=True).returncode == 0:
            return path
    pytest.skip(f"there is no Python {major}.{minor} or newer here")


def node_folder(name: str, *scripts: str) -> Path:
    """A folder with the scripts of `NAME/`, and what its package.json lists."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("there is no npm here")
    folder = ROOT / ".venvs" / name
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("package.json", *scripts):
        shutil.copy(HERE / name / file, folder / file)
    subprocess.run(
        [npm, "install", "--no-audit", "--no-fund", "--silent"],
        cwd=folder,
        check=True,
        timeout=INSTALL_SECONDS,
    )
    return folder
