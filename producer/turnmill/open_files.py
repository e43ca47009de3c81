"""This process's limit of open files."""

from __future__ import annotations

import contextlib
import resource
from typing import Final

MOST: Final = 65_536


def allow_many_files() -> None:
    """Raise it as far as may be: what shells set (1024) is soon reached where each client, or each sandbox, has some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if hard == resource.RLIM_INFINITY else min(MOST, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
