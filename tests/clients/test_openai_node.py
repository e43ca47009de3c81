"""OpenAI's own client for Node."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.clients.conversations import converses_through_kills
from tests.clients.environments import node_folder
from tests.clients.refusals import Refusals
from tests.clients.through_kills import Harness

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def scripts() -> Path:
    return node_folder("openai_node", "converse.mjs", "refusals.mjs")


def test_chat_streams_and_tools_go_through_kills(
    harness: Harness, scripts: Path, tmp_path: Path
) -> None:
    converses_through_kills(harness, ("node", scripts / "converse.mjs"), tmp_path)


def test_errors_are_its_own(refusals: Refusals, scripts: Path) -> None:
    assert refusals.run("node", scripts / "refusals.mjs") == {
        "busy": ["one", "two"],
        "late": "late",
        "long": ["BadRequestError", "context_length_exceeded"],
        "model": ["NotFoundError", "model_not_found"],
        "key": ["AuthenticationError", "invalid_api_key"],
    }
