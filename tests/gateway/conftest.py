from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from tests.acceptance.conftest import make_cli, on_farm
from tests.gateway.serving import Asking, GatewayProcess

from turnmill.settings import Farm

__all__ = ["make_cli", "on_farm"]


@pytest.fixture
def serve(farm: Farm, tmp_path: Path) -> Iterator[Callable[..., GatewayProcess]]:
    """Starts gateways: `serve("--insecure")`."""
    gateways: list[GatewayProcess] = []

    def start(*options: str, farm: Farm = farm) -> GatewayProcess:
        log = tmp_path / f"gateway-{len(gateways)}.log"
        gateways.append(GatewayProcess(farm, log, options))
        return gateways[-1]

    yield start
    for gateway in gateways:
        gateway.kill()
        assert "Traceback" not in gateway.log, gateway.log


@pytest.fixture
async def asking() -> AsyncIterator[Callable[..., Asking]]:
    """Makes clients: `asking(gateway.url + "/v1", key)`."""
    made: list[Asking] = []

    def make(base: str, key: str | None = None) -> Asking:
        made.append(Asking(base, key))
        return made[-1]

    yield make
    for one in made:
        await one.http.aclose()
