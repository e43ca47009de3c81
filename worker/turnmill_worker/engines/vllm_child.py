"""What vLLM's processes do for their worker's sake. vLLM calls it in each of them, as one of its plugins (pyproject.toml)."""

from __future__ import annotations

import ctypes
import os
import signal

WORKER = "TURNMILL_VLLM_WORKER"
"""Environment variable: the process id of the worker."""

_PR_SET_PDEATHSIG = 1


def stay_with_worker() -> None:
    """In a process of a worker's engine, and nowhere else: die when the worker does, because an engine without one holds
    its GPU for ever; and leave Ctrl-C to the worker, which lets the running turns end first."""
    worker = int(os.environ.get(WORKER) or 0)
    if worker in (0, os.getpid()):
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    if os.getppid() == worker:  # the engine's own children watch the engine
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != worker:  # it died before that
            os.kill(os.getpid(), signal.SIGKILL)
