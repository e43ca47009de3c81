"""What a client makes of the gateway's errors, and of answers that take longer than it waits."""

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
"""Seconds of a turn: longer than clients wait between their tries, unless they do as `Retry-After` says; and than
the 2 s that the scripts allow to a `late` answer."""


class Refusals:
    """Runs a client's script outside a run. It writes `refusals.json`:

    `busy`: the answers to two turns with `NARROW_API_KEY`, which may have one open, so that one finds it full.
    `late`: the answer to a turn for which it waits less long than it takes, and tries again.
    `long`, `model`, `key`: what is raised for a prompt that is too long, for a model that nobody serves, and for a key
    that nobody has.
    """

    def __init__(
        self, cli: Cli, serve: Callable[..., GatewayProcess], worker: Callable[..., SimWorker]
    ) -> None:
        self._cli, self._serve, self._worker = cli, serve, worker

    def run(self, *command: str | Path, **environment: str) -> dict[str, Any]:
        self._worker(sim=("--context", "500", "--latency", LATENCY))
        gateway = self._serve()
        process = subprocess.run(
            command,
            cwd=self._cli.folder,
            env={
                **self._cli.environment,
                **environment,
                "OPENAI_BASE_URL": f"{gateway.url}/v1",
                "OPENAI_API_KEY": self._key("alice"),
                "NARROW_API_KEY": self._key("bob", "--max-queued", "1"),
            },
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert process.returncode == 0, process.stderr
        counts = _counts(gateway)
        assert counts['requests_total{endpoint="/v1/chat/completions",status="429"}'] == 1, (
            "it waited for as long as it was told"
        )
        assert counts["hang_ups_total"] == 1
        assert counts['turns_total{how="made"}'] == 3, "who tries again finds the turn"
        refusals = json.loads((self._cli.folder / "refusals.json").read_text())
        assert isinstance(refusals, dict)
        return refusals

    def _key(self, *name: str) -> str:
        return self._cli("keys", "add", *name).stdout.strip()


def _counts(gateway: GatewayProcess) -> dict[str, int]:
    """Its counters."""
    with urllib.request.urlopen(f"{gateway.url}/metrics", timeout=20) as response:
        text = response.read().decode()
    found = re.findall(r"^turnmill_gateway_(\S+_total\S*) (\d+)$", text, re.MULTILINE)
    return {name: int(count) for name, count in found}
