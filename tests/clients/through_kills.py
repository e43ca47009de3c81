"""A harness, run through `turnmill exec`: as it is, and with a worker and the gateway killed in the middle."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import redis
from tests.acceptance.conftest import Cli
from tests.processes import SimWorker, until

from turnmill.settings import Farm

PATIENCE = 240.0
"""Seconds. Some harnesses import for half a minute on a busy machine."""
LEASE = 0.5

Command = Sequence[str | Path]


class Harness:
    """Runs a harness's command in folders of its own; the scripted engine is all that it ever talks to."""

    def __init__(self, farm: Farm, cli: Cli, worker: Callable[..., SimWorker]) -> None:
        self._farm, self._cli, self._worker = farm, cli, worker
        self.workers: list[SimWorker] = []

    def serve(self, *sim: str, served_name: str = "sim", slots: int = 4) -> None:
        """Start one more worker; the arguments are the scripted engine's."""
        options = ("--served-name", served_name, "--slots", str(slots))
        self.workers.append(self._worker(*options, lease=LEASE, sim=sim))

    def start(
        self, run: str, command: Command, folder: Path, **environment: str
    ) -> subprocess.Popen[str]:
        line = ("exec", run, "--json", "--", *map(str, command))
        return self._cli.start(*line, folder=folder, **environment)

    def run(self, run: str, command: Command, folder: Path, **environment: str) -> dict[str, Any]:
        """To its end, which must be a good one. Returns what `exec` reports."""
        return self.ends_well(self.start(run, command, folder, **environment))

    def ends_well(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, f"exit {process.returncode}\n{out}\n{err}"
        report = json.loads(err.splitlines()[-1])
        assert isinstance(report, dict)
        return report

    def count(self, run: str, field: str) -> int:
        with redis.Redis.from_url(self._farm.url) as connection:
            return int(connection.hget(self._farm.keys.run(run), field) or 0)

    def goes_through_kills(
        self,
        command: Callable[[Path], Command],
        outcome: Callable[[Path], Any],
        *sim: str,
        again: Callable[[Path], Command] | None = None,
        remembers: bool = False,
        served_name: str = "sim",
        **environment: str,
    ) -> None:
        """Run the command in a folder, undisturbed; then in another one, where the worker is killed after a third of the turns
        and the gateway after two, and run it (or `again`) there once more: the outcome is the same, nothing was asked
        twice, and what was answered once came from the store. `remembers`: the harness itself does not ask again for some
        of what it was told."""
        slow = (*sim, "--latency", "0.25")
        plain, killed = self._cli.folder / "plain", self._cli.folder / "killed"
        plain.mkdir()
        killed.mkdir()
        self.serve(*sim, served_name=served_name)
        report = self.run("plain", command(plain), plain, **environment)
        wanted, turns = outcome(plain), self.count("plain", "total")
        assert report["stored"] == 0
        assert turns >= 6, "too few to be killed in the middle of"
        self.workers[-1].kill()
        self._cli("forget", "--yes", "plain")  # greedy and seeded turns are shared by all runs

        self.serve(*slow, served_name=served_name, slots=2)
        process = self.start("killed", command(killed), killed, **environment)
        self._until_done(process, turns // 3)
        self.workers[-1].kill()
        self.serve(*slow, served_name=served_name, slots=2)
        self._until_done(process, 2 * turns // 3)
        process.kill()  # the gateway is in this process
        process.communicate(timeout=PATIENCE)
        before = self.count("killed", "done")
        assert before < turns, "the kill came too late"
        report = self.run("killed", (again or command)(killed), killed, **environment)
        assert outcome(killed) == wanted
        assert self.count("killed", "total") == self.count("killed", "done") == turns
        assert remembers or report["stored"] >= before
        assert report["made"] <= turns - before

    def _until_done(self, process: subprocess.Popen[str], count: int) -> None:
        def done() -> bool:
            assert process.poll() is None, process.communicate()
            return self.count("killed", "done") >= count

        until(done, f"{count} turns are done", PATIENCE)
