"""What a worker does with one turn, without a farm around it."""

from __future__ import annotations

import pytest

from turnmill.settings import Farm
from turnmill.turn import Turn
from turnmill.wire import encode_turn
from turnmill_worker.claim import Claim, Company
from turnmill_worker.engines import load
from turnmill_worker.engines.base import EngineSettings
from turnmill_worker.worker import Ending, TurnWorker, _Running


@pytest.mark.parametrize(("ending", "verb"), [("drain", "requeue"), ("unwanted", "cancelled")])
async def test_a_turn_that_is_ended_before_it_has_begun_is_still_handed_in(
    farm: Farm, ending: Ending, verb: str
) -> None:
    """asyncio never runs a task that is cancelled before its first step: its turn would be renewed for ever."""
    worker = TurnWorker(load("sim")(EngineSettings()), farm)
    turn = Turn.model_validate({"model": "sim", "messages": [{"role": "user", "content": "hi"}]})
    running = _Running(Claim(turn.hash, "w" * 24, Company.ANY, 0.0, encode_turn(turn)))
    worker._running[turn.hash] = running
    task = worker.loop.create_task(worker._run_turn(running))
    running.end(ending)
    await task
    assert worker._running == {}
    assert [(finish.hash, finish.verb) for finish in worker._exchanges.finished] == [
        (turn.hash, verb)
    ]
