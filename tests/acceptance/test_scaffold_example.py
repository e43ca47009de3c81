"""The scaffold of docs/scaffolds.md, copied as it stands, with the function that the page asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from tests.acceptance.conftest import Cli
from tests.processes import SimWorker

PAGE = (Path(__file__).parents[2] / "docs" / "scaffolds.md").read_text()

CALCULATE = """

import json, math


async def calculate(arguments: str) -> int:
    return math.prod(json.loads(arguments)["product_of"])
"""


def test_it_runs(on_farm: Cli, worker: Callable[..., SimWorker]) -> None:
    code = re.search(r'```python\n(""".*?)```', PAGE.split("## Writing one")[1], re.DOTALL)
    assert code
    assert CALCULATE.strip().splitlines()[3].rstrip(":") in PAGE
    (on_farm.folder / "word_problems.py").write_text(code[1] + CALCULATE)
    right, wrong = "What is 17 * 23?", "What is 2 * 3?"
    on_farm.write(
        [
            {"id": "p1", "question": right, "answer": 391},
            {"id": "p2", "question": wrong, "answer": 6},
        ]
    )
    call = {"name": "calculate", "arguments": {"product_of": [17, 23]}}
    play = on_farm.write(
        [
            {"users": [right], "answers": [{"tool_calls": [call]}, {"content": "It is 391."}]},
            {"users": [wrong], "answers": [{"content": "It is 5."}]},
        ],
        "play.jsonl",
    )
    worker(sim=("--play", str(play)))
    line = ("run", "in.jsonl", "--run", "run", "--scaffold", "word_problems:word_problems")
    report = json.loads(on_farm(*line, "--json").stdout)
    assert report["endings"] == {"answered": 2}
    assert report["scores"] == {"count": 2, "mean": 0.5}
    first = (on_farm.folder / "runs/run/replies.jsonl").read_text().splitlines()[0]
    assert [message.get("content") for message in json.loads(first)["messages"][2:]] == [
        "391",
        "It is 391.",
    ]
