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


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_model_that_is_no_path_is_not_taken_for_one_of_the_hub(engine: str) -> None:
    check_path(engine, "Qwen/Qwen3-8B")
    check_path(engine, str(Path(__file__).parent))
    check_path(engine, None)
    for path in ("./nowhere/at-all", "/nowhere/at-all"):
        with pytest.raises(UsageError, match=f"{engine}: --model {path}: there is no such"):
            check_path(engine, path)
