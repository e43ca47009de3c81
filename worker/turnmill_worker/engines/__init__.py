"""The engines by name. An engine's module, and with it the engine, is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from turnmill.errors import UsageError
from turnmill_worker.engines.base import EngineFactory

_INSTALL = {
    "sglang": "pip install 'turnmill[sglang]'",
    "vllm": "pip install 'turnmill[vllm]'",
    "openai": "pip install 'turnmill[openai]'",
    "local": "pip install 'turnmill[local]'",
    "sim": "pip install turnmill",
}
"""Every engine, with what installs it. Its module has its name, but where another package has that name."""
_MODULES = {"openai": "openai_server"}

ENGINES = tuple(_INSTALL)


def load(name: str) -> EngineFactory:
    """The `build` of an engine. Raises UsageError for an unknown name or a missing package."""
    if name not in _INSTALL:
        raise UsageError(f"engine {name!r} is unknown; there are {', '.join(ENGINES)}")
    try:
        module = import_module(f"turnmill_worker.engines.{_MODULES.get(name, name)}")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"engine {name} needs {error.name}, which is not installed: {_INSTALL[name]}, "
            "or choose another with --engine"
        ) from error
    return cast(EngineFactory, module.build)
