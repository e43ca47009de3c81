"""Stands in for SGLang's compiled kernels, of which PyPI has no CPU build.

With SGLANG_USE_CPU_ENGINE=1 SGLang imports many `*_cpu` names from here without asking whether it
will need them. With the torch-native attention and the PyTorch sampler it calls one of them, which
has a body below. The others exist as names, and say so if they are ever called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.0.0"


def assign_req_to_token_pool_cpu(
    request_rows: Any, table: Any, starts: Any, ends: Any, locations: Any, _width: int
) -> None:
    """Write each request's new cache locations, which lie one after another in `locations`, into
    the columns [start, end) of its row of the table."""
    taken = 0
    for row, start, end in zip(request_rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        count = end - start
        table[row, start:end] = locations[taken : taken + count].to(table.dtype)
        taken += count


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.endswith("_cpu"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def missing(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} needs SGLang's compiled kernels")

    return missing
