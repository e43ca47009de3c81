"""Lets SGLang load LoRA adapters on a machine without an accelerator.

SGLang's LoRA layers ask torch for pinned memory, whatever the device (`pin_memory=True` in sglang/srt/lora). A machine that has
nothing to copy to has no such memory, and torch refuses. Plain memory is as good there: it is pinned for the sake of speed.
"""

from __future__ import annotations

import functools
import importlib.abc
import sys
from collections.abc import Callable
from typing import Any

_MAKERS = ("tensor", "empty", "zeros")


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)
        return make(*args, **options)

    return made


class _UnpinFirst(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, _path: Any = None, _target: Any = None) -> None:
        if fullname != "sglang.srt.lora.layers":
            return
        sys.meta_path.remove(self)
        import torch

        for name in _MAKERS:
            setattr(torch, name, _unpinned(getattr(torch, name)))
        torch.Tensor.pin_memory = lambda self, *_args: self


sys.meta_path.insert(0, _UnpinFirst())
