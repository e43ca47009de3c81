"""What a terminal shows."""

from __future__ import annotations

import re
import time

from rich.console import Console

from turnmill.client import FarmStatus
from turnmill.display import status_tables
from turnmill.queue import Depth
from turnmill.reply import EngineIdentity
from turnmill.store import WorkerInfo


def test_numbers_and_headings_are_whole_in_a_narrow_terminal() -> None:
    worker = WorkerInfo(
        id="c2328884",
        host="gpu-machine-017.cluster",
        pid=123456,
        model="an-organisation/a-model",
        engine=EngineIdentity(engine="sglang", version="0.5.23", model="an-organisation/a-model"),
        slots=256,
        context=8192,
        running=256,
        state="draining",
        started=time.time() - 123456,
        heartbeat=time.time(),
    )
    console = Console(width=80)
    with console.capture() as captured:
        console.print(status_tables(FarmStatus(workers=[worker], benched=[], queues={}, runs=[])))
    for cell in ("slots", "running", "256", "draining", "123456 s", "0 s ago"):
        assert f" {cell} " in captured.get()


def test_names_are_whole_in_a_narrow_terminal() -> None:
    model = "an-organisation/a-model-with-a-long-name-7B"
    queues = {model: Depth(queued=1, running=0, due=0, suspects=0)}
    console = Console(width=60)
    with console.capture() as captured:
        console.print(status_tables(FarmStatus(workers=[], benched=[], queues=queues, runs=[])))
    cells = re.findall(r"^\u2502 (\S+) +\u2502", captured.get(), re.MULTILINE)
    assert "".join(cells) == model
