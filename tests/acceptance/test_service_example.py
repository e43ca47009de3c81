"""The service example, as it is run by hand, against a real farm."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.processes import SimWorker

from turnmill.settings import Farm

EXAMPLE = Path(__file__).parents[2] / "examples" / "service.py"


def ask(farm: Farm | None, *questions: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("REDIS_URL", "MODEL")}
    if farm is not None:
        environment |= {"REDIS_URL": farm.url, "TURNMILL_NAMESPACE": farm.namespace}
    return subprocess.run(
        [sys.executable, EXAMPLE, *questions],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_it_is_answered_in_two_turns(farm: Farm, worker: Callable[..., SimWorker]) -> None:
    worker()
    done = ask(farm, "Why is the sky blue?", "What is a tide?")
    assert done.returncode == 0, done.stderr
    assert "asked for 2 turns" in done.stdout
    for said in ("Why is the sky blue?", "What is a tide?"):
        assert done.stdout.count(said) == 1
    assert done.stdout.count("Say it in one sentence.") == 2
    assert done.stdout.count("by sim ") == 2


def test_asked_again_it_is_answered_from_the_store(
    farm: Farm, worker: Callable[..., SimWorker]
) -> None:
    first_worker = worker("--served-name", "m")
    first = ask(farm, "Anyone there?")
    assert first.returncode == 0, first.stderr
    first_worker.kill()
    # This one refuses whatever it is asked, so the answers are those of before.
    worker("--served-name", "m", sim=("--reject-if", "?"))
    again = ask(farm, "Anyone there?")
    assert again.returncode == 0, again.stderr
    assert again.stdout == first.stdout


def test_a_refused_turn_is_shown_and_fails_the_service(
    farm: Farm, worker: Callable[..., SimWorker]
) -> None:
    worker(sim=("--reject-if", "storm"))
    done = ask(farm, "What is a storm?")
    assert done.returncode == 1, done.stderr
    assert "failed: invalid_request" in done.stdout


def test_without_a_farm_it_says_what_to_set() -> None:
    done = ask(None)
    assert done.returncode == 2
    assert "REDIS_URL" in done.stderr
    assert "Traceback" not in done.stderr
