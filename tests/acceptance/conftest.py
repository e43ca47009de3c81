"""The command line as users have it: real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from turnmill.settings import Farm

ROOT = str(Path(__file__).parents[2])


class Cli:
    """Runs `turnmill` in a folder, on a farm or (without one) with an embedded server of its own."""

    def __init__(self, folder: Path, farm: Farm | None) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("REDIS_URL", "TURNMILL_NAMESPACE", "COLUMNS")
        } | {"TURNMILL_DATA": str(folder / "data")}
        # For the scaffolds of the tests.
        path = (ROOT, os.environ.get("PYTHONPATH", ""))
        self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        if farm:
            self.environment |= {"REDIS_URL": farm.url, "TURNMILL_NAMESPACE": farm.namespace}

    def start(
        self,
        *arguments: str,
        stdin: int = subprocess.DEVNULL,
        folder: Path | None = None,
        **environment: str,
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "turnmill", *arguments],
            cwd=folder or self.folder,
            env=self.environment | environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def __call__(
        self, *arguments: str, exits: int = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end, and see that it exits as it should."""
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=60)
        assert process.returncode == exits, f"exit {process.returncode}\n{out}\n{err}"
        assert "Traceback" not in err
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def conversations(self, count: int, turns: int = 3, name: str = "in.jsonl") -> Path:
        """A file of conversations, each greedy."""
        return self.write(
            [
                {
                    "id": f"c{i}",
                    "turns": [f"conversation {i}, turn {k}" for k in range(turns)],
                    "sampling": {"temperature": 0},
                }
                for i in range(count)
            ],
            name,
        )

    def write(self, lines: list[object], name: str = "in.jsonl") -> Path:
        path = self.folder / name
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path


@pytest.fixture
def make_cli(tmp_path: Path) -> Iterator[Callable[..., Cli]]:
    made: list[Cli] = []

    def make(farm: Farm | None = None) -> Cli:
        made.append(Cli(tmp_path, farm))
        return made[-1]

    yield make
    for cli in made:
        for process in cli.started:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def on_farm(make_cli: Callable[..., Cli], farm: Farm) -> Cli:
    return make_cli(farm)


@pytest.fixture
def alone(make_cli: Callable[..., Cli]) -> Cli:
    return make_cli()
