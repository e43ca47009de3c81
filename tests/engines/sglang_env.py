"""What SGLang needs to run on a machine without a GPU: environment, import path, arguments.

Nothing here is turnmill's: on a GPU none of it is needed. Import this before sglang.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

SHIMS = Path(__file__).parent / "shims"

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # The engine's processes share few cores: more threads each only wait for one another.
    "OMP_NUM_THREADS": "1",
    # Penalties go through torch.compile, which would need a C++ compiler and a minute.
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}

ARGUMENTS = (
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch"),
    *("--grammar-backend", "xgrammar"),
    *("--dtype", "float32"),
    *("--mem-fraction-static", "0.2"),
    *("--max-total-tokens", "16384"),  # or it takes half of the machine's memory for its cache
    *("--max-running-requests", "32"),
    "--disable-cuda-graph",
    "--disable-overlap-schedule",
    "--sleep-on-idle",  # or it spins on a core that the tests need
    *("--log-level", "warning"),
)
"""SGLang's own arguments, for `turnmill worker --engine sglang -- ...` and for its HTTP server."""


def environment() -> dict[str, str]:
    """The environment for a new process that will import sglang."""
    path = [str(SHIMS), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **os.environ,
        **ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "PYTHONWARNINGS": "ignore",
    }


def prepare() -> None:
    """Make this process, and the ones that it spawns, able to import sglang."""
    os.environ.update(environment())
    if str(SHIMS) not in sys.path:
        sys.path.insert(0, str(SHIMS))
    importlib.import_module("torchvision_ops")  # Python's start, which would do it, is over
