"""`resume`: a finished run, run again by the same command: all is answered from the store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.conditions import conditions
from benchmarks.farm import ROOT, server_version
from benchmarks.measure import Spread
from benchmarks.report import COUNT, Result, Row

GOAL_SECONDS = 10.0
CONVERSATIONS, TURNS = 2_500, 4

Say = Callable[[str], None]


def run(rounds: int, say: Say) -> Result:
    with tempfile.TemporaryDirectory(prefix="turnmill-bench-") as name:
        folder = Path(name)
        source = folder / "conversations.jsonl"
        source.write_text(
            "".join(json.dumps(_conversation(i)) + "\n" for i in range(CONVERSATIONS))
        )
        say(f"answering {CONVERSATIONS * TURNS} turns")
        first, report = _turnmill_run(source, folder)
        assert report["asked"] == CONVERSATIONS * TURNS, report
        say(f"answered in {first:.1f} s")
        seconds = []
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            took, report = _turnmill_run(source, folder)
            assert report["from_store"] == CONVERSATIONS * TURNS, report
            assert report["asked"] == 0, report
            seconds.append(took)
    turns = CONVERSATIONS * TURNS
    return Result(
        "resume",
        f"A finished run of {turns:,} turns, run again",
        [
            Row(
                "seconds",
                "seconds, the whole command",
                Spread.of(seconds),
                "{:.1f}",
                GOAL_SECONDS,
                "below",
            ),
            Row("turns_per_s", "turns/s", Spread.of([turns / s for s in seconds]), COUNT),
        ],
        {
            "turnmill": f"`turnmill run`, {CONVERSATIONS:,} conversations of {TURNS} turns, with its embedded server "
            "and a worker with the sim engine; starting and ending all of it is in the time"
        },
        conditions(server_version()),
        interleaved=False,
    )


def _conversation(number: int) -> dict[str, object]:
    text = "All that is asked of the mill is that it turns. " * 8
    return {"id": f"c{number}", "turns": [f"{text}{number}.{k}" for k in range(TURNS)]}


def _turnmill_run(source: Path, folder: Path) -> tuple[float, dict[str, int]]:
    command = [sys.executable, "-m", "turnmill", "run", str(source), "--run", "bench", "--json"]
    command += ["--data", str(folder / "data"), "--out", str(folder / "out"), "--engine", "sim"]
    environment = {k: v for k, v in os.environ.items() if k not in ("REDIS_URL", "TURNMILL_DATA")}
    started = time.monotonic()
    done = subprocess.run(
        [*command, "--", "--answer", "history-hash"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    took = time.monotonic() - started
    if done.returncode:
        raise RuntimeError(f"turnmill run ended with {done.returncode}: {done.stderr[-2000:]}")
    return took, json.loads(done.stdout)
