"""The sandboxes that there are where the tests run."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from turnmill.errors import UsageError
from turnmill.scaffolds.vanillux.kinds import Bubblewrap, Docker, Kind, Limits, Local

_FETCHED = Path(__file__).parents[1] / ".venvs" / "bubblewrap" / "bwrap"


@functools.cache
def path_with_bubblewrap() -> str:
    """The PATH, with a bwrap on it if there is one."""
    path = os.environ.get("PATH", os.defpath)
    if shutil.which("bwrap") not in (None, str(_FETCHED)) or not _FETCHED.exists():
        return path
    # Where the tests are root's, sandboxes are nobody's, who may not look into root's folders.
    folder = tempfile.mkdtemp(prefix="tm")
    atexit.register(shutil.rmtree, folder)
    os.chmod(folder, 0o755)
    shutil.copy(_FETCHED, folder)
    return f"{folder}:{path}"


@functools.cache
def _kind(name: str) -> Kind | str:
    """The kind of this name, or why it is not there."""
    before = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = path_with_bubblewrap()
    try:
        if name == "bubblewrap":
            return Bubblewrap.found(Limits(processes=100, memory=512, space=16))
        if name == "docker":
            return Docker.found(Limits(processes=100, memory=512, space=16), "debian:12")
        return Local(Limits())
    except UsageError as error:
        return str(error)
    finally:
        os.environ["PATH"] = before


def a_kind(name: str) -> Kind:
    """Skips the test where this machine has none. `make test` fetches bubblewrap where it can."""
    kind = _kind(name)
    if isinstance(kind, str):
        pytest.skip(kind)
    return kind
