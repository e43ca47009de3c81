"""The programs on the pages of the clients are whole: they run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.clients.environments import ROOT, node_folder, python_of
from tests.clients.through_kills import Harness

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

MODEL = "Qwen/Qwen3-8B"


def program(page: str, language: str = "python") -> str:
    """The first one of the page."""
    text = (ROOT / "docs" / "harnesses" / page).read_text()
    found = re.search(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


@pytest.mark.parametrize(
    ("page", "environment", "turns"),
    [
        ("openai.md", "openai_python", 2),
        ("litellm.md", "litellm", 2),
        ("pydantic-ai.md", "pydantic_ai", 1),
    ],
)
def test_programs_in_python(
    harness: Harness, tmp_path: Path, page: str, environment: str, turns: int
) -> None:
    script = tmp_path / "ask.py"
    script.write_text(program(page))
    harness.serve(served_name=MODEL)
    command = (python_of(environment), script)
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    assert harness.run("r", command, tmp_path, **offline)["made"] == turns
    assert harness.run("r", command, tmp_path, **offline)["stored"] == turns


def test_the_program_for_node(harness: Harness, tmp_path: Path) -> None:
    folder = node_folder("openai_node")
    script = folder / "of_the_page.mjs"
    script.write_text(program("openai.md", "js"))
    harness.serve(served_name=MODEL)
    assert harness.run("r", ("node", script), tmp_path)["made"] == 2
