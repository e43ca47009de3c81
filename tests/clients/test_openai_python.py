"""OpenAI's own client for Python."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.clients.conversations import converses_through_kills
from tests.clients.environments import HERE, python_of
from tests.clients.through_kills import Harness

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]


def test_chat_streams_and_tools_go_through_kills(harness: Harness, tmp_path: Path) -> None:
    command = (python_of("openai_python"), HERE / "openai_python" / "converse.py")
    converses_through_kills(harness, command, tmp_path, streams_tools=False)
