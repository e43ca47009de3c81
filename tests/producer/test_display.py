"""What a terminal shows."""

from __future__ import annotations

import re

from rich.console import Console

from turnmill.client import FarmStatus
from turnmill.display import status_tables
from turnmill.queue import Depth


def test_names_are_whole_in_a_narrow_terminal() -> None:
    model = "an-organisation/a-model-with-a-long-name-7B"
    queues = {model: Depth(queued=1, running=0, due=0, suspects=0)}
    console = Console(width=60)
    with console.capture() as captured:
        console.print(status_tables(FarmStatus(workers=[], benched=[], queues=queues, runs=[])))
    cells = re.findall(r"^\u2502 (\S+) +\u2502", captured.get(), re.MULTILINE)
    assert "".join(cells) == model
