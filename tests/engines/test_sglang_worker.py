"""A worker with the real SGLang: what it says of itself, its answers, and its death."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.engines import sglang_env
from tests.engines.worker_life import Workers, lives_through_deaths
from tests.processes import ValkeyServer

from turnmill.settings import Farm

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]


@pytest.fixture
def farm(own_valkey: Callable[..., ValkeyServer]) -> Farm:
    return Farm(own_valkey().url)


@pytest.fixture
def workers(farm: Farm, sglang_model: Path, tmp_path: Path) -> Iterator[Workers]:
    arguments, environment = sglang_env.ARGUMENTS, sglang_env.environment()
    log = tmp_path / "worker.log"
    one_by_one = Workers("sglang", farm, sglang_model, arguments, environment, log)
    yield one_by_one
    one_by_one.end()


async def test_answers_side_by_side_and_goes_on_when_an_engine_or_a_worker_dies(
    farm: Farm, workers: Workers
) -> None:
    await lives_through_deaths(farm, workers, 32, _scheduler)


def _scheduler(pid: int) -> int:
    children = psutil.Process(pid).children(recursive=True)
    return next(child.pid for child in children if "scheduler" in " ".join(child.cmdline()))
