"""What a worker is started with: who forgets the `--` before its engine's own options is told of it, and so is who misspells a path."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from turnmill.cli.run import run
from turnmill.errors import UsageError
from turnmill_worker.cli import worker
from turnmill_worker.drill_cli import drill
from turnmill_worker.engines.arguments import check_path


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (run, ("in.jsonl", "--run", "r", "--latency", "3")),
        (worker, ("--engine", "sim", "--latency", "3")),
        (drill, ("--latency", "3")),
    ],
)
def test_an_option_of_the_engine_without_the_dashes(
    command: click.Command, line: tuple[str, ...]
) -> None:
    said = CliRunner().invoke(command, line)
    assert said.exit_code == 2
    assert "No such option '--latency'. An engine's own options stand after --." in said.output


def test_a_path_to_nothing_is_not_taken_for_a_name_on_the_hub() -> None:
    check_path("--model", "Qwen/Qwen3-8B")
    check_path("--model", str(Path(__file__).parent))
    check_path("--model", None)
    for path in ("./nowhere/at-all", "/nowhere/at-all"):
        with pytest.raises(UsageError, match=f"--model {path}: there is no such"):
            check_path("--model", path)
