"""Whether an engine lives: by its tokens, or by its own word."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.processes import until_async

from turnmill.tasks import end_tasks
from turnmill_worker import pulse
from turnmill_worker.engines.base import EngineAway, EngineDied, Progress
from turnmill_worker.pulse import Pulse


class Patient:
    """An engine of which only the health is asked."""

    def __init__(self, healthy: Callable[[], Awaitable[bool]]) -> None:
        self.healthy, self.checks = self._counted, 0
        self._healthy = healthy

    async def _counted(self) -> bool:
        self.checks += 1
        return await self._healthy()


async def well() -> bool:
    return True


async def unwell() -> bool:
    return False


async def silent() -> bool:
    await asyncio.Event().wait()
    return True


async def dead() -> bool:
    raise EngineDied("its process has ended")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "CHECK_SECONDS", 0.005)
    monkeypatch.setattr(pulse, "HEALTH_TIMEOUT", 0.005)


@asynccontextmanager
async def watched(
    patient: Patient, progress: Progress | None = None
) -> AsyncIterator[tuple[Pulse, list[str]]]:
    engine: Any = patient
    deaths: list[str] = []
    one = Pulse(engine, lambda: [progress] if progress else [])
    watching = asyncio.create_task(one.watch(deaths.append))
    await asyncio.sleep(0)  # it has begun
    try:
        yield one, deaths
    finally:
        await end_tasks([watching])


async def checked(patient: Patient, times: int) -> None:
    async def reached() -> bool:
        return patient.checks >= times

    await until_async(reached)


def test_before_it_is_watched_it_does_not_age() -> None:
    engine: Any = Patient(well)
    assert Pulse(engine, list).age() == 0


async def test_an_engine_that_says_it_is_well_lives() -> None:
    patient = Patient(well)
    async with watched(patient) as (one, deaths):
        born = one._lived
        await checked(patient, 10)
        assert one._lived > born
        assert deaths == []


@pytest.mark.parametrize("how", [unwell, silent])
async def test_one_that_does_not_grows_old(how: Any) -> None:
    patient = Patient(how)
    async with watched(patient) as (one, deaths):
        born = one._lived
        await checked(patient, 10)
        assert one._lived == born
        assert deaths == []


@pytest.mark.parametrize("how", [unwell, silent])
async def test_tokens_are_life_whatever_it_says(how: Any) -> None:
    patient, progress = Patient(how), Progress()
    async with watched(patient, progress) as (one, _):
        born = one._lived
        await checked(patient, 3)
        progress.moved(5)
        await checked(patient, 6)
        assert one._lived > born


async def test_a_death_is_told_once_in_the_engine_s_words() -> None:
    patient = Patient(dead)
    async with watched(patient) as (_, deaths):
        await checked(patient, 1)
    assert deaths == ["its process has ended"]
    assert patient.checks == 1


async def test_one_that_is_away_lives_and_comes_back() -> None:
    there = asyncio.Event()

    async def away_at_first() -> bool:
        if not there.is_set():
            raise EngineAway("no route to it")
        return True

    patient = Patient(away_at_first)
    async with watched(patient) as (one, deaths):
        born = one._lived
        await checked(patient, 3)
        assert one.away == "no route to it"
        assert one._lived > born
        there.set()
        await checked(patient, patient.checks + 2)
        assert one.away == ""
        assert deaths == []


async def test_whoever_learns_first_that_it_is_away_is_believed_until_it_says_otherwise() -> None:
    patient = Patient(unwell)
    async with watched(patient) as (one, _):
        one.away = "a turn met nobody"
        await checked(patient, 3)
        assert one.away == "a turn met nobody"
