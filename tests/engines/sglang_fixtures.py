"""The real SGLang on the CPU, started once for all tests of a session: the engine inside turnmill,
and beside it SGLang's own HTTP server with the same model and arguments."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines import sglang_env
from tests.engines.own_server import Server, ServerProcess, own_server

from turnmill_worker.engines import load
from turnmill_worker.engines.base import Capacity, Engine, EngineSettings
from turnmill_worker.engines.sglang import SGLangEngine

SGLANG = importlib.util.find_spec("sglang") is not None

PARSERS = ("--tool-call-parser", "qwen", "--reasoning-parser", "qwen3")
"""Of SGLang's server. The engine is to find the same by itself."""
SETTINGS = (*sglang_env.ARGUMENTS, "--tool-call-parser", "auto", "--reasoning-parser", "auto")


@pytest.fixture(scope="session")
def sglang_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not SGLANG:
        pytest.skip("SGLang is not installed here")
    sglang_env.prepare()
    from tests.engines import tiny_model

    return tiny_model.make(tmp_path_factory.mktemp("sglang") / "tiny-qwen2")


@pytest.fixture(scope="session")
def sglang_capacity_before() -> list[Capacity]:
    """Holds what `capacity` said before the engine's loop ran, once `sglang_engine` is there."""
    return []


@pytest.fixture(scope="session")
def sglang_engine(
    sglang_model: Path, sglang_capacity_before: list[Capacity], _server_process: ServerProcess
) -> Iterator[SGLangEngine]:
    """The engine, its loop running. Its `close` kills all children of this process, so it is the last
    thing that a session does."""
    engine = SGLangEngine(EngineSettings(model=str(sglang_model), arguments=SETTINGS))
    try:
        sglang_capacity_before.append(engine.capacity())
        engine.start()
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="session")
def _server_process(
    sglang_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """It comes up while the engine does, so the two cost one wait."""
    command = ["-m", "sglang.launch_server", "--model-path", str(sglang_model)]
    command += [*sglang_env.ARGUMENTS, *PARSERS, "--skip-server-warmup"]
    log = tmp_path_factory.mktemp("server") / "log"
    with own_server(command, sglang_env.environment(), log) as server:
        yield server


@pytest.fixture(scope="session")
def sglang_server(_server_process: ServerProcess, sglang_engine: SGLangEngine) -> Server:
    _server_process.wait()
    return _server_process


@pytest.fixture(scope="session")
def sglang_server_engine(sglang_server: Server) -> Iterator[Engine]:
    """The engine for OpenAI-compatible servers, in front of SGLang's."""
    engine = load("openai")(EngineSettings(arguments=(f"{sglang_server.url}/v1",)))
    yield engine
    engine.close()
