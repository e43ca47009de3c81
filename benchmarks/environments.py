"""Environments of their own, made once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.farm import ROOT


def sglang_python(say: Callable[[str], None]) -> Path:
    """The Python of the environment in which SGLang runs on the CPU."""
    python = ROOT / ".venvs" / "sglang" / "bin" / "python"
    if not python.exists():
        say("making SGLang's environment")
        subprocess.run(["make", ".venvs/sglang/ready"], cwd=ROOT, check=True, stdout=sys.stderr)
    return python


def rival_python(name: str, requirements: Sequence[str], say: Callable[[str], None]) -> Path:
    """The Python of `.venvs/rival-NAME`, in which these requirements are installed."""
    folder = ROOT / ".venvs" / f"rival-{name}"
    python, ready = folder / "bin" / "python", folder / "ready"
    wanted = "\n".join(requirements)
    if not ready.exists() or ready.read_text() != wanted:
        say(f"making {folder.relative_to(ROOT)}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip: list[str | Path] = [
            python,
            "-m",
            "pip",
            "install",
            "-qq",
            "--disable-pip-version-check",
        ]
        subprocess.run([*pip, *requirements], check=True)
        ready.write_text(wanted)
    return python
