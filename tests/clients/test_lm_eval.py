"""lm-evaluation-harness: tasks of its own format, greedy and drawn, over chats; and over prompts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.clients.environments import HERE, python_of
from tests.clients.through_kills import Command, Harness

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

MILLS, REPEATS = 8, 2
WRONG = 3
"""The mill whose sacks the engine gets wrong."""


class Evaluation:
    """A command in a folder with the tasks and their data, and what it wrote there. No model hub is asked."""

    def __init__(self, tasks: str, model: str, endpoint: str, *options: str) -> None:
        self._program = python_of("lm_eval").with_name("lm_eval")
        self._arguments = (
            f"--model {model} --tasks {tasks} --include_path . --output_path out --log_samples "
            f"--model_args model=sim,base_url=$OPENAI_BASE_URL/{endpoint},num_concurrent=8,"
            f"tokenizer_backend=None {' '.join(options)}"
        )

    def command(self, folder: Path) -> Command:
        for task in (HERE / "lm_eval").glob("*.yaml"):
            shutil.copy(task, folder)
        lines = [json.dumps({"mill": mill, "sacks": f"{10 + mill}"}) for mill in range(MILLS)]
        (folder / "mills.jsonl").write_text("\n".join(lines))
        return ("sh", "-c", f"exec {self._program} run {self._arguments}")

    @staticmethod
    def environment(folder: Path) -> dict[str, str]:
        return {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}

    def outcome(self, folder: Path) -> Any:
        """Of each task and sample its answers and its score."""
        said: dict[str, dict[int, Any]] = {}
        for file in (folder / "out").rglob("samples_*.jsonl"):
            samples = [json.loads(line) for line in file.read_text().splitlines()]
            task = file.name.removeprefix("samples_").partition("_20")[0]
            said[task] = {line["doc_id"]: (line["resps"], line["exact_match"]) for line in samples}
        return said


def play(path: Path) -> Path:
    scenes = [
        {
            "users": [f"How many sacks has mill {mill}?"],
            "answers": [{"content": "none" if mill == WRONG else f"{10 + mill}"}],
        }
        for mill in range(MILLS)
    ]
    path.write_text("".join(json.dumps(scene) + "\n" for scene in scenes))
    return path


def expected(repeats: int) -> dict[int, Any]:
    answers = ["none" if mill == WRONG else f"{10 + mill}" for mill in range(MILLS)]
    return {i: ([[answers[i]] * repeats], float(i != WRONG)) for i in range(MILLS)}


def test_greedy_and_drawn_chats_go_through_kills(harness: Harness, tmp_path: Path) -> None:
    tasks, model = "mills,mills_drawn", "local-chat-completions"
    evaluation = Evaluation(tasks, model, "chat/completions", "--apply_chat_template")
    harness.goes_through_kills(
        evaluation.command,
        evaluation.outcome,
        "--play",
        str(play(tmp_path / "play.jsonl")),
        **evaluation.environment(tmp_path),
    )
    assert evaluation.outcome(tmp_path / "killed") == {
        "mills": expected(1),
        "mills_drawn": expected(REPEATS),
    }
    assert harness.count("killed", "total") == MILLS * (1 + REPEATS)


def test_prompts_are_completed(harness: Harness, tmp_path: Path) -> None:
    evaluation = Evaluation("mills_echoed", "local-completions", "completions")
    harness.serve("--answer", "echo")
    environment = evaluation.environment(tmp_path)
    report = harness.run("prompts", evaluation.command(tmp_path), tmp_path, **environment)
    assert (report["made"], report["failed"]) == (MILLS, 0)
    answers = evaluation.outcome(tmp_path)["mills_echoed"]
    assert answers == {i: ([[f"How many sacks has mill {i}?"]], 1.0) for i in range(MILLS)}
