"""What a worker does with one turn, without a farm around it."""

from __future__ import annotations

import pytest
from tests.processes import until_async

from turnmill.settings import Farm
from turnmill.turn import Turn
from turnmill.wire import encode_turn
from turnmill_worker.claim import Claim, Company
from turnmill_worker.engines import load
from turnmill_worker.engines.base import EngineSettings
from turnmill_worker.side import Ending, Running
from turnmill_worker.worker import TurnWorker


@pytest.mark.parametrize(("ending", "verb"), [("drain", "requeue"), ("unwanted", "cancelled")])
async def test_a_turn_that_is_ended_before_it_has_begun_is_still_handed_in(
    farm: Farm, ending: Ending, verb: str
) -> None:
    """asyncio never runs a task that is cancelled before its first step: its turn would be renewed for ever."""
    worker = TurnWorker(load("sim")(EngineSettings()), farm)
    (side,) = worker._sides
    turn = Turn.model_validate({"model": "sim", "messages": [{"role": "user", "content": "hi"}]})
    running = Running(Claim(turn.hash, "w" * 24, Company.ANY, 0.0, encode_turn(turn)))
    side.running[turn.hash] = running
    task = worker.loop.create_task(worker._run_turn(side, running))
    running.end(ending)
    await task
    assert side.running == {}
    assert [(finish.hash, finish.verb) for finish in side.exchanges.finished] == [(turn.hash, verb)]


async def test_a_turn_that_lapsed_and_came_back_to_its_worker_is_in_the_engine_once(
    farm: Farm,
) -> None:
    engine = load("sim")(EngineSettings(arguments=("--hang-if", "hi")))
    worker = TurnWorker(engine, farm)
    (side,) = worker._sides
    turn = Turn.model_validate({"model": "sim", "messages": [{"role": "user", "content": "hi"}]})
    worker.allow_pick_jobs = False  # nothing else is claimed
    for number in range(2):
        token = f"{number}" * 24
        await worker._begin(side, [Claim(turn.hash, token, Company.ANY, 0.0, encode_turn(turn))])
        await until_async(lambda: _true(engine.running() == 1))
    await until_async(lambda: _true(len(side.exchanges.finished) == 1))
    (lapsed,) = side.exchanges.finished
    assert (lapsed.token, lapsed.verb) == ("0" * 24, "requeue")
    assert side.running[turn.hash].claim.token == "1" * 24
    side.running[turn.hash].end("drain")
    await until_async(lambda: _true(engine.running() == 0))


async def _true(state: bool) -> bool:
    return state
