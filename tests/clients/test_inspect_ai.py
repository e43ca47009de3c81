"""inspect-ai: a task with tools, the same command again, and `inspect eval-retry`."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.clients.environments import HERE, python_of
from tests.clients.through_kills import Command, Harness

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

MILLS, EPOCHS = 8, 2
WRONG = 3
"""The mill whose sacks the engine gets wrong."""


@pytest.fixture(scope="module")
def inspect() -> Path:
    return python_of("inspect_ai").with_name("inspect")


@pytest.fixture
def play(tmp_path: Path) -> Path:
    scenes = [
        {
            "users": [f"How many sacks has mill {mill}?"],
            "answers": [
                {"tool_calls": [{"name": "sacks", "arguments": {"mill": mill}}]},
                {"content": "none" if mill == WRONG else f"{10 + mill}"},
            ],
        }
        for mill in range(MILLS)
    ]
    path = tmp_path / "play.jsonl"
    path.write_text("".join(json.dumps(scene) + "\n" for scene in scenes))
    return path


class Evaluation:
    """The commands, and what is in the log that the last of them has written."""

    def __init__(self, inspect: Path, **arguments: str) -> None:
        self._inspect = inspect
        self._arguments = [
            part for name in arguments for part in ("-T", f"{name}={arguments[name]}")
        ]

    def command(self, folder: Path) -> Command:
        shutil.copy(HERE / "inspect_ai" / "sacks.py", folder)
        model = ("--model", "openai-api/openai/sim", "--epochs", str(EPOCHS))
        return (self._inspect, "eval", "sacks.py", *model, *self._arguments, "--display", "plain")

    def retry(self, folder: Path) -> Command:
        (killed,) = (folder / "logs").glob("*.eval")
        return (self._inspect, "eval-retry", killed, "--display", "plain")

    def outcome(self, folder: Path) -> Any:
        """Of each sample its answers, its tools' and its score, and how many draws there are among the first answers:
        the scripted engine names each call by its turn."""
        last = max((folder / "logs").glob("*.eval"), key=lambda path: path.stat().st_mtime_ns)
        dump = subprocess.run([self._inspect, "log", "dump", last], check=True, capture_output=True)
        log = json.loads(dump.stdout)
        assert log["status"] == "success"
        said: dict[int, list[Any]] = {}
        calls: set[str] = set()
        for sample in log["samples"]:
            _, asked, counted, answer = sample["messages"]
            calls.add(asked["tool_calls"][0]["id"])
            line = [counted["content"], answer["content"], sample["scores"]["match"]["value"]]
            said.setdefault(sample["id"], []).append(line)
        return said, len(calls)


EXPECTED = {
    mill: EPOCHS
    * [[f"{10 + mill}", "none" if mill == WRONG else f"{10 + mill}", "I" if mill == WRONG else "C"]]
    for mill in range(MILLS)
}


def test_the_same_command_goes_on(
    harness: Harness, inspect: Path, play: Path, tmp_path: Path
) -> None:
    evaluation = Evaluation(inspect)
    harness.goes_through_kills(
        evaluation.command, evaluation.outcome, "--play", str(play), XDG_DATA_HOME=str(tmp_path)
    )
    assert evaluation.outcome(tmp_path / "killed") == (EXPECTED, MILLS * EPOCHS)


def test_a_retry_goes_on(harness: Harness, inspect: Path, play: Path, tmp_path: Path) -> None:
    evaluation = Evaluation(inspect, seeded="true")
    harness.goes_through_kills(
        evaluation.command,
        evaluation.outcome,
        "--play",
        str(play),
        again=evaluation.retry,
        remembers=True,
        XDG_DATA_HOME=str(tmp_path),
    )
    assert evaluation.outcome(tmp_path / "killed") == (EXPECTED, MILLS * EPOCHS)
