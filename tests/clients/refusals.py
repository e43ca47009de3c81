"""What a client makes of the gateway's errors: it is run outside a run, with a key that may have one turn open."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.acceptance.conftest import Cli
from tests.gateway.serving import GatewayProcess
from tests.processes import SimWorker

PATIENCE = 120.0
LATENCY = "3"
"""Seconds of a turn: longer than clients wait between their tries, unless they do as `Retry-After` says."""


class Refusals:
    """Runs a client's script, which writes `refusals.json`: the answers to two turns of which one finds the queue full
    (`busy`), then what is raised for a prompt that is too `long`, for a `model` that nobody serves, and for a `key`
    that nobody has."""

    def __init__(
        self, cli: Cli, serve: Callable[..., GatewayProcess], worker: Callable[..., SimWorker]
    ) -> None:
        self._cli, self._serve, self._worker = cli, serve, worker

    def run(self, *command: str | Path, **environment: str) -> dict[str, Any]:
        self._worker(sim=("--context", "500", "--latency", LATENCY))
        key = self._cli("keys", "add", "alice", "--max-queued", "1").stdout.strip()
        gateway = self._serve()
        process = subprocess.run(
            command,
            cwd=self._cli.folder,
            env={
                **self._cli.environment,
                **environment,
                "OPENAI_BASE_URL": f"{gateway.url}/v1",
                "OPENAI_API_KEY": key,
            },
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert process.returncode == 0, process.stderr
        counted = _count(gateway, 429)
        assert counted == 1, f"{counted} refusals: it did not wait for as long as it was told"
        refusals = json.loads((self._cli.folder / "refusals.json").read_text())
        assert isinstance(refusals, dict)
        return refusals


def _count(gateway: GatewayProcess, status: int) -> int:
    """The responses with this status."""
    with urllib.request.urlopen(f"{gateway.url}/metrics", timeout=20) as response:
        text = response.read().decode()
    counts = re.findall(rf'requests_total{{.*status="{status}"}} (\d+)', text)
    return sum(map(int, counts))
