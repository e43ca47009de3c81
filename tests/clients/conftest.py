"""Clients of other makers, each installed in an environment of its own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="session")
def node() -> Path:
    """The folder of the Node client, with what it needs installed."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("there is no npm here")
    folder = ROOT / ".venvs" / "node"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "ask.mjs"):
        shutil.copy(Path(__file__).parent / "node" / name, folder / name)
    subprocess.run(
        [npm, "install", "--no-audit", "--no-fund", "--silent"], cwd=folder, check=True, timeout=300
    )
    return folder
