"""`queue`: no-op turns a second of one worker and of two, beside stock workers of other queues.

Turns wait in the queue before the workers start; the rate is taken from a fifth of them to four fifths, so neither
starting up nor the end is in it. Every measurement has a server of its own, with the same data as in the other rounds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.conditions import conditions
from benchmarks.contenders import (
    KINDS,
    SLOTS,
    Contender,
    Measure,
    Rival,
    Say,
    Turnmill,
    fill,
    measure,
)
from benchmarks.farm import server_version
from benchmarks.measure import Spread, interleaved
from benchmarks.raw import record, replay
from benchmarks.report import COUNT, RATIO, Result, Row
from benchmarks.turns import turn
from turnmill.wire import encode_turn

GOAL, AHEAD = 7.0, 1.0
TURNS, RAW_TURNS, RIVAL_JOBS = 19_000, 5_000, 3_000
"""The stream of finished turns, from which the times are taken, holds 20,000."""


def run(rounds: int, say: Say) -> Result:
    with tempfile.TemporaryDirectory(prefix="turnmill-bench-") as name:
        return _run(Path(name), rounds, say)


def _run(folder: Path, rounds: int, say: Say) -> Result:
    contenders: dict[str, Contender] = {"turnmill": Turnmill(TURNS)}
    settings = {
        "turnmill": f"sim engine, no latency, {SLOTS} slots; {TURNS:,} turns of {len(encode_turn(turn(0)))} B queued "
        "before; reply and trace stored"
    }
    for name in KINDS:
        rival = Rival(name, RIVAL_JOBS, say)
        contenders[name], settings[name] = rival, rival.about
    for name, contender in contenders.items():
        say(f"filling {name}")
        fill(contender, folder / name)
    few = Turnmill(RAW_TURNS)
    fill(few, folder / "raw")
    say("recording the commands of the scripts")
    commands = record(few, folder / "raw")

    measures: dict[str, Callable[[], Measure]] = {
        name: partial(measure, contender, folder / name) for name, contender in contenders.items()
    }
    for name in ("turnmill", "arq"):
        measures[f"{name}_two"] = partial(measure, contenders[name], folder / name, workers=2)
    measures["raw"] = lambda: _raw(commands, folder / "raw")
    measured = interleaved(measures, rounds, say)
    settings |= {
        "raw": f"what CLAIM and FINISH do for {RAW_TURNS:,} turns, {len(commands) / RAW_TURNS:.1f} commands a turn, recorded "
        "with MONITOR and sent again by one pipelining client",
        "measured": "from a fifth of the turns to four fifths: no start, and no end where pollers wait",
    }
    return Result("queue", "No-op turns", _rows(measured), settings, conditions(server_version()))


def _raw(commands: list[bytes], filled: Path) -> Measure:
    seconds = replay(commands, filled)
    return Measure(RAW_TURNS / seconds, 0.0, 1e6 * seconds / RAW_TURNS)


def _rows(measured: dict[str, list[Measure]]) -> list[Row]:
    rates = {name: Spread.of([m.rate for m in of]) for name, of in measured.items()}
    ours = rates["turnmill"]
    rows = [
        Row("ratio_vs_arq", "turnmill / arq", ours.over(rates["arq"]), RATIO, GOAL),
        Row(
            "ratio_vs_arq_two",
            "turnmill / arq, two workers each",
            rates["turnmill_two"].over(rates["arq_two"]),
            RATIO,
            GOAL,
        ),
    ]
    for name in KINDS:
        if name != "arq":
            ratio = ours.over(rates[name])
            rows.append(Row(f"ratio_vs_{name}", f"turnmill / {name}", ratio, RATIO, AHEAD))
    share = ours.over(rates["raw"])
    rows.append(Row("share_of_raw", "turnmill / the same commands, raw", share, RATIO))
    for name, of in measured.items():
        text = name.replace("_two", ", two workers")
        rows.append(Row(f"{name}_turns_per_s", f"{text}: turns/s", rates[name], COUNT))
        if name != "raw":
            worker = Spread.of([m.worker_cpu for m in of])
            rows.append(Row(f"{name}_worker_us", f"{text}: workers' CPU a turn, µs", worker, COUNT))
        server = Spread.of([m.server_cpu for m in of])
        rows.append(Row(f"{name}_server_us", f"{text}: server's CPU a turn, µs", server, COUNT))
    return rows
