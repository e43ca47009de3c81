"""What vLLM needs to run on a machine without a GPU: environment and arguments. Nothing here is turnmill's."""

from __future__ import annotations

import os

ENVIRONMENT = {
    # The engine's processes share few cores: more threads each only wait for one another.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The model in the engine core's own process: one process less to start.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

SLOTS, CACHE_BLOCKS, BLOCK = 32, 640, 32
"""A cache of 20,480 tokens: all slots fit into it, and little more."""

ARGUMENTS = (
    *("--dtype", "float32"),
    *("--max-num-seqs", str(SLOTS)),
    *("--num-gpu-blocks-override", str(CACHE_BLOCKS)),
    *(
        "--block-size",
        str(BLOCK),
    ),  # what is cached is whole blocks; it would have 128 tokens in each
    *("--kv-cache-memory-bytes", str(64 << 20)),  # or it takes half of the machine's for its cache
    *("--distributed-executor-backend", "uni"),
    "--enforce-eager",
    "--disable-log-stats",
    *("--scheduling-policy", "priority"),
)
"""vLLM's own arguments, for `turnmill worker --engine vllm -- ...` and for its HTTP server."""


def environment() -> dict[str, str]:
    """The environment for a new process that will import vllm."""
    return {**os.environ, **ENVIRONMENT, "PYTHONWARNINGS": "ignore"}


def prepare() -> None:
    """Make this process, and the ones that it starts, such."""
    os.environ.update(environment())
