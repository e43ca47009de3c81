"""An engine's own HTTP server, beside the engine in turnmill."""

from __future__ import annotations

import contextlib
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

_START_SECONDS = 300.0


@dataclass
class Server:
    """It, where it can be asked."""

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
            raise RuntimeError(f"the server ended:\n{self.log.read_text()[-3000:]}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
            return True
        return False

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + _START_SECONDS
        while not self.ready():
            assert time.monotonic() < deadline, "the server does not come up"
            time.sleep(0.2)


@contextlib.contextmanager
def own_server(
    command: list[str], environment: dict[str, str], log: Path
) -> Iterator[ServerProcess]:
    """Starts one by Python's arguments; the port is added to them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, *command, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    yield ServerProcess(f"http://127.0.0.1:{port}", process, log)
    process.terminate()
    process.wait()
