"""Lets PyPI's torchvision be imported beside a CPU build of torch.

torchvision registers Python parts of two operators whose definitions are in its compiled library;
that library was linked against the CUDA build and is not loaded, so torch refuses. The operators are
declared just before torchvision is imported. Nothing calls them: SGLang only imports transforms.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import sys
from typing import Any


class _DeclareFirst(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, _path: Any = None, _target: Any = None) -> None:
        if fullname != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        for operator in ("nms", "qnms"):
            with contextlib.suppress(RuntimeError):  # it is there after all
                torch.library.define(
                    f"torchvision::{operator}",
                    "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                )


sys.meta_path.insert(0, _DeclareFirst())
