"""Child processes that end with their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Final

from turnmill.errors import UsageError

_PR_SET_PDEATHSIG: Final = 1


def parent_death_signal(number: int = signal.SIGKILL) -> Callable[[], None]:
    """A `preexec_fn` for subprocess: the kernel sends the child this signal when its parent ends, in
    whatever way.

    The kernel's parent is the THREAD that started the child: start it from a thread that lives as
    long as the child should. Raises UsageError where there is no such signal (it is Linux's).
    """
    if sys.platform != "linux":
        raise UsageError("processes that end with their parent need Linux: set REDIS_URL")
    # Everything is looked up before the fork: between fork and exec another thread's lock may be
    # held for ever, so the child only calls.
    prctl, getppid, parent = ctypes.CDLL(None, use_errno=True).prctl, os.getppid, os.getpid()

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, number)
        if getppid() != parent:  # it ended before the kernel was told
            os._exit(1)

    return in_child
