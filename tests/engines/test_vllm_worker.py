"""A worker with the real vLLM: what it says of itself, its answers, and its death."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.engines import vllm_env
from tests.engines.worker_life import Workers, lives_through_deaths
from tests.processes import ValkeyServer

from turnmill.settings import Farm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.fixture
def farm(own_valkey: Callable[..., ValkeyServer]) -> Farm:
    return Farm(own_valkey().url)


@pytest.fixture
def workers(farm: Farm, vllm_model: Path, tmp_path: Path) -> Iterator[Workers]:
    # As on a machine with several GPUs: a process for the engine core, and below it one for the model.
    environment = vllm_env.environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    log = tmp_path / "worker.log"
    one_by_one = Workers("vllm", farm, vllm_model, vllm_env.ARGUMENTS, environment, log)
    yield one_by_one
    one_by_one.end()


async def test_answers_side_by_side_and_goes_on_when_an_engine_or_a_worker_dies(
    farm: Farm, workers: Workers
) -> None:
    await lives_through_deaths(farm, workers, vllm_env.SLOTS, _engine_core)


def _engine_core(pid: int) -> int:
    """The process that has a process below it."""
    children = psutil.Process(pid).children()
    return next(child.pid for child in children if child.children())
