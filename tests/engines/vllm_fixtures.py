"""The real vLLM on the CPU, started once for all tests of a session: the engine inside turnmill, and beside it vLLM's own
HTTP server with the same model and arguments."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines import vllm_env
from tests.engines.own_server import Server, ServerProcess, own_server

from turnmill_worker.engines import load
from turnmill_worker.engines.base import EngineSettings
from turnmill_worker.engines.vllm import VLLMEngine

VLLM = importlib.util.find_spec("vllm") is not None

PARSERS = (
    "--enable-auto-tool-choice",
    *("--tool-call-parser", "hermes"),
    *("--reasoning-parser", "qwen3"),
)
"""Of vLLM's server. The engine is to find the same by itself."""
SETTINGS = (*vllm_env.ARGUMENTS, "--tool-call-parser", "auto", "--reasoning-parser", "auto")


@pytest.fixture(scope="session")
def vllm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not VLLM:
        pytest.skip("vLLM is not installed here")
    vllm_env.prepare()
    from tests.engines import tiny_model

    # vLLM's attention on a CPU wants heads of 32.
    return tiny_model.make(tmp_path_factory.mktemp("vllm") / "tiny-qwen2", heads=2, seed=7)


@pytest.fixture(scope="session")
def _vllm_server_process(
    vllm_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """It comes up while the engine does, so the two cost one wait."""
    # `vllm serve` asks for a package of that name, and the CPU's build has another.
    module = "vllm.entrypoints.launchers.api_server.entry"
    command = ["-m", module, "--model", str(vllm_model), *vllm_env.ARGUMENTS, *PARSERS]
    log = tmp_path_factory.mktemp("server") / "log"
    with own_server(command, vllm_env.environment(), log) as server:
        yield server


@pytest.fixture(scope="session")
def vllm_engine(vllm_model: Path, _vllm_server_process: ServerProcess) -> Iterator[VLLMEngine]:
    engine = load("vllm")(EngineSettings(model=str(vllm_model), arguments=SETTINGS))
    assert isinstance(engine, VLLMEngine)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def vllm_server(_vllm_server_process: ServerProcess, vllm_engine: VLLMEngine) -> Server:
    _vllm_server_process.wait()
    return _vllm_server_process
