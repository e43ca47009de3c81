"""Clients of other makers, each installed in an environment of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance.conftest import make_cli, on_farm
from tests.clients.environments import node_folder
from tests.clients.refusals import Refusals
from tests.clients.through_kills import Harness
from tests.gateway.conftest import serve
from tests.gateway.serving import GatewayProcess
from tests.processes import SimWorker

from turnmill.settings import Farm

__all__ = ["make_cli", "on_farm", "serve"]


@pytest.fixture(scope="session")
def node() -> Path:
    """The folder of the Node client of the queue itself."""
    return node_folder("node", "ask.mjs")


@pytest.fixture
def harness(farm: Farm, on_farm: Any, worker: Callable[..., SimWorker]) -> Harness:
    """Runs clients of OpenAI's API through `turnmill exec`."""
    return Harness(farm, on_farm, worker)


@pytest.fixture
def refusals(
    on_farm: Any, serve: Callable[..., GatewayProcess], worker: Callable[..., SimWorker]
) -> Refusals:
    """Runs a client against a gateway that refuses what it asks."""
    return Refusals(on_farm, serve, worker)
