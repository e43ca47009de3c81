"""The real SGLang on the CPU, started once for all tests of a session: the engine inside turnmill,
and beside it SGLang's own HTTP server with the same model and arguments."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.engines import sglang_env

from turnmill_worker.engines import load
from turnmill_worker.engines.base import Capacity, Engine, EngineSettings
from turnmill_worker.engines.sglang import SGLangEngine

SGLANG = importlib.util.find_spec("sglang") is not None

PARSERS = ("--tool-call-parser", "qwen", "--reasoning-parser", "qwen3")
SETTINGS = (*sglang_env.ARGUMENTS, *PARSERS)

_START_SECONDS = 300.0


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


@dataclass
class Server:
    """SGLang's HTTP server."""

    url: str

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """The response of /v1/chat/completions, errors too."""
        return self._post("/v1/chat/completions", body)

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The response of /v1/completions, errors too."""
        return self._post("/v1/completions", body)

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.url}{path}",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                answer: dict[str, Any] = json.load(response)
        except urllib.error.HTTPError as error:
            answer = json.load(error)
        return answer


@dataclass
class ServerProcess(Server):
    process: subprocess.Popen[bytes]
    log: Path

    def ready(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"SGLang's server ended:\n{self.log.read_text()[-3000:]}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
            return True
        return False


@pytest.fixture(scope="session")
def _server_process(
    sglang_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """It comes up while the engine does, so the two cost one wait."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(sglang_model)]
    command += [*SETTINGS, "--skip-server-warmup", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=sglang_env.environment(), stdout=output, stderr=subprocess.STDOUT
        )
    yield ServerProcess(f"http://127.0.0.1:{port}", process, log)
    process.terminate()
    process.wait()


@pytest.fixture(scope="session")
def sglang_server(_server_process: ServerProcess, sglang_engine: SGLangEngine) -> Server:
    deadline = time.monotonic() + _START_SECONDS
    while not _server_process.ready():
        assert time.monotonic() < deadline, "SGLang's server does not come up"
        time.sleep(0.2)
    return _server_process


@pytest.fixture(scope="session")
def sglang_server_engine(sglang_server: Server) -> Iterator[Engine]:
    """The engine for OpenAI-compatible servers, in front of SGLang's."""
    engine = load("openai")(EngineSettings(arguments=(f"{sglang_server.url}/v1",)))
    yield engine
    engine.close()
