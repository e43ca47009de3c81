"""litellm, with its own retries."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.clients.conversations import converses_through_kills
from tests.clients.environments import HERE, python_of
from tests.clients.refusals import Refusals
from tests.clients.through_kills import Harness

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

SCRIPTS = HERE / "litellm"
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""It asks the network for prices otherwise."""


@pytest.fixture(scope="module")
def python() -> Path:
    return python_of("litellm")


def test_chat_streams_and_tools_go_through_kills(
    harness: Harness, python: Path, tmp_path: Path
) -> None:
    command = (python, SCRIPTS / "converse.py")
    converses_through_kills(harness, command, tmp_path, **OFFLINE)


def test_errors_are_its_own(refusals: Refusals, python: Path) -> None:
    assert refusals.run(python, SCRIPTS / "refusals.py", **OFFLINE) == {
        "busy": ["one", "two"],
        "late": "late",
        "long": ["ContextWindowExceededError", 400],
        "model": ["NotFoundError", 404],
        "key": ["AuthenticationError", 401],
    }
