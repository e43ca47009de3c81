"""The function calling leaderboard's own command line: its multi-turn entries, played right, and scored by itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.clients.environments import HERE, ROOT, python_of
from tests.clients.through_kills import Command, Harness

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

IDS = {
    "multi_turn_base": [f"multi_turn_base_{number}" for number in (0, 53, 103, 151)],
    "multi_turn_miss_func": [f"multi_turn_miss_func_{number}" for number in (3, 120)],
}
MODEL = "sim/FC_1"
"""Served names may have slashes and underscores; bfcl makes one of the other."""
BFCL = {"BFCL_PROJECT_ROOT": ".", "BFCL_MODEL": MODEL}


def documented_script(path: Path) -> Path:
    """The script of the page about this harness."""
    text = (ROOT / "docs" / "harnesses" / "bfcl-eval.md").read_text()
    (script,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    path.write_text(script)
    return path


def run(folder: Path, *command: str | Path) -> None:
    environment = {**os.environ, **BFCL, "OPENAI_API_KEY": "not asked"}
    subprocess.run(command, cwd=folder, env=environment, check=True)


def result_files(folder: Path) -> list[Path]:
    return sorted((folder / "result").rglob("BFCL_v4_*_result.json"))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def outcome_of(script: Command) -> Callable[[Path], Any]:
    """What was answered, call by call and with the log of all states, and how bfcl scores it."""

    def outcome(folder: Path) -> Any:
        which = ("--model", MODEL, "--test-category", ",".join(IDS), "--partial-eval")
        run(folder, *script, "evaluate", *which)
        results = [line for path in result_files(folder) for line in lines(path)]
        for result in results:
            del result["latency"]
        scores = {path.name: lines(path)[0] for path in (folder / "score").rglob("*_score.json")}
        return results, scores

    return outcome


def test_multi_turn_entries_go_through_kills(harness: Harness, tmp_path: Path) -> None:
    python = python_of("bfcl_eval")
    script = (python, documented_script(tmp_path / "bfcl_served.py"))
    ids, play = tmp_path / "ids.json", tmp_path / "play.jsonl"
    ids.write_text(json.dumps(IDS))
    run(tmp_path, python, HERE / "bfcl_eval" / "ground_truth.py", ids, play)
    outcome = outcome_of(script)

    def resume(folder: Path) -> Command:
        (folder / "test_case_ids_to_generate.json").write_text(ids.read_text())
        return (*script, "generate", "--model", MODEL, "--run-ids", "--num-threads", "4")

    def generate(folder: Path) -> Command:
        for path in result_files(folder):
            if not path.read_text().endswith("\n"):
                path.unlink()  # bfcl was killed as it wrote it, and cannot read it
        return (*resume(folder), "--allow-overwrite")

    harness.goes_through_kills(generate, outcome, "--play", str(play), served_name=MODEL, **BFCL)
    killed = tmp_path / "killed"
    results, scores = outcome(killed)
    assert [result["id"] for result in results] == [
        name for names in IDS.values() for name in names
    ]
    assert scores == {
        f"BFCL_v4_{category}_score.json": {
            "accuracy": 1.0,
            "correct_count": len(names),
            "total_count": len(names),
        }
        for category, names in IDS.items()
    }

    # Its own memory are its result files: what is in them is not even asked again.
    (first, *_) = result_files(killed)
    whole = first.read_text()
    first.write_text("".join(whole.splitlines(keepends=True)[1:]))
    lost = results[0]
    report = harness.run("killed", resume(killed), killed, **BFCL)
    assert (report["stored"], report["made"]) == (sum(map(len, lost["result"])), 0)
    assert outcome(killed) == (results, scores)
