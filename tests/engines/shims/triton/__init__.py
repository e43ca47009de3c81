"""Stands in for triton, which is a gigabyte and compiles for GPUs only.

SGLang brings a mock of its own, for Apple machines (`sglang/_platform_stubs.py`): any attribute
exists, decorators hand back what they decorate. It is loaded here by its path, because importing it
as part of `sglang` would import triton first. Added is what torch and transformers look for.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_NAME = "_sglang_platform_stubs"
_FILE = next(
    file
    for file in (Path(folder) / "sglang" / "_platform_stubs.py" for folder in sys.path)
    if file.is_file()
)
_spec = importlib.util.spec_from_file_location(_NAME, _FILE)
assert _spec is not None
assert _spec.loader is not None
_stubs = importlib.util.module_from_spec(_spec)
sys.modules[_NAME] = _stubs  # its dataclasses look their own module up
_spec.loader.exec_module(_stubs)

sys.meta_path.insert(0, _stubs._TritonFinder())


class _Constexpr:
    """`tl.constexpr(x)`: some modules make one at import."""

    def __init__(self, value: object = None) -> None:
        self.value = value


class _JITFunction:
    """torch asks whether a function is one of these."""


# This replaces the module that is being imported, in sys.modules; that is what importers get.
_triton = _stubs._make_mock("triton")
_triton.__version__ = "3.0.0"
_triton.cdiv = _stubs._cdiv
_triton.next_power_of_2 = _stubs._next_power_of_2
_triton.Config = _stubs._Config
_triton.language = _stubs._make_mock("triton.language")
_triton.language.constexpr = _Constexpr
for _name in (
    "runtime",
    "runtime.jit",
    "compiler",
    "compiler.compiler",
    "tools",
    "backends",
    "backends.compiler",
    "testing",
):
    _stubs._make_mock(f"triton.{_name}")
sys.modules["triton.runtime.jit"].JITFunction = _JITFunction  # type: ignore[attr-defined]
