"""What the scripted engine is told to do, it does: that is what other tests build on."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from tests.engines.asking import ask, new_rid, turn, until

from turnmill.turn import Message
from turnmill_worker.engines.base import EngineDied, EngineSettings, InvalidRequest, Progress
from turnmill_worker.engines.base import TurnError as EngineTurnError
from turnmill_worker.engines.sim import SimEngine, build, history_hash

Make = Callable[..., SimEngine]


@pytest.fixture
def sim() -> Iterator[Make]:
    """A factory: `sim("--context", "20")`."""
    built: list[SimEngine] = []

    def make(*arguments: str) -> SimEngine:
        built.append(build(EngineSettings(arguments=arguments)))
        return built[-1]

    yield make
    for engine in built:
        engine.close()


# Answers


async def test_it_echoes_the_last_user_message(sim: Make):
    history = ("one", {"role": "assistant", "content": "1"}, "two  and\nthree")
    answer = await ask(sim(), turn(*history))
    assert answer.message == {"role": "assistant", "content": "two  and\nthree"}
    assert (answer.finish, answer.usage.completion_tokens) == ("stop", 3)
    assert answer.usage.prompt_tokens == 8  # user: one assistant: 1 user: two and three


async def test_it_answers_with_a_digest_of_the_history(sim: Make):
    history = [Message(role="user", content="one"), Message(role="assistant", content="1")]
    answer = await ask(
        sim("--answer", "history-hash"), turn("one", {"content": "1", "role": "assistant"})
    )
    assert answer.message["content"] == history_hash(history)


def test_every_change_of_a_history_changes_its_digest():
    one, two = Message(role="user", content="one"), Message(role="user", content="two")
    histories = [
        [one],
        [two],
        [one, two],
        [two, one],
        [one, one],
        [Message(role="assistant", content="one")],
        [Message(role="user", content=[{"type": "text", "text": "one"}])],
        [Message(role="user", content="one", tool_call_id="1")],
    ]
    assert len({history_hash(history) for history in histories}) == len(histories)


def test_the_digest_is_pinned():
    assert history_hash([Message(role="user", content="Grüße")]) == "bb297094a478ab77"


async def test_short_answers_are_padded(sim: Make):
    engine = sim("--answer-tokens", "12")
    answer = await ask(engine, turn("hello", max_tokens=None))
    assert answer.usage.completion_tokens == 12
    assert answer.message["content"].startswith("hello grain husk")


async def test_the_answer_grows_at_the_speed_that_is_set(sim: Make):
    seen: list[int] = []

    class Watched(Progress):
        def moved(self, tokens: int) -> None:
            seen.append(tokens)
            super().moved(tokens)

    engine = sim("--latency", "0.1", "--tokens-per-second", "40", "--answer-tokens", "21")
    loop = asyncio.get_running_loop()
    start = loop.time()
    await ask(engine, turn("hello", max_tokens=None), Watched())
    assert loop.time() - start >= 0.1 + 20 / 40
    assert seen == [1, 11, 21]


async def test_no_more_turns_run_than_there_are_slots(sim: Make):
    engine = sim("--slots", "2", "--latency", "0.2")
    started = [Progress() for _ in range(5)]
    tasks = [asyncio.create_task(ask(engine, turn("hello"), each)) for each in started]
    await until(lambda: sum(bool(each.tokens) for each in started) >= 2)
    assert [bool(each.tokens) for each in started] == [True, True, False, False, False]
    await asyncio.gather(*tasks)


async def test_a_slot_of_a_cancelled_turn_is_passed_on(sim: Make):
    engine = sim("--slots", "1", "--hang-if", "stop here")
    hanging, waiting, last = [
        asyncio.create_task(ask(engine, turn(text))) for text in ("stop here", "wait", "go on")
    ]
    await until(lambda: engine.running() == 3)
    waiting.cancel()
    hanging.cancel()
    assert (await last).message["content"] == "go on"


async def test_a_turn_cancelled_as_its_slot_comes_free_passes_the_slot_on(sim: Make):
    engine = sim("--slots", "1", "--hang-if", "stop here")
    first, second, third = [
        asyncio.create_task(ask(engine, turn(text))) for text in ("stop here", "mill", "river")
    ]
    await until(lambda: engine.running() == 3)
    first.cancel()
    await asyncio.sleep(0)  # the first passes its slot on, but the second has not run yet
    second.cancel()
    assert (await third).message["content"] == "river"


# Faults


async def test_a_fault_meets_its_own_turn_alone(sim: Make):
    engine = sim("--fail-if", "bad luck", "--reject-if", "bad turn")
    with pytest.raises(EngineTurnError):
        await ask(engine, turn("what bad luck"))
    with pytest.raises(InvalidRequest):
        await ask(engine, turn("a bad turn", {"role": "assistant", "content": "?"}, "go on"))
    assert await ask(engine, turn("good"))
    assert engine.running() == 0


async def test_when_it_dies_all_its_turns_end(sim: Make):
    engine = sim("--slots", "1", "--hang-if", "wait", "--die-if", "poison")
    tasks = [asyncio.create_task(ask(engine, turn("wait"))) for _ in range(3)]
    await until(lambda: engine.running() == 3)
    with pytest.raises(EngineDied):
        await ask(engine, turn("poison"))
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, EngineDied) for end in ends)
    for after in (engine.healthy(), ask(engine, turn("hello"))):
        with pytest.raises(EngineDied):
            await after
    assert engine.running() == 0


async def test_a_hanging_turn_never_moves_but_can_be_aborted(sim: Make):
    engine = sim("--hang-if", "wait")
    progress, rid = Progress(), new_rid()
    task = asyncio.create_task(engine.answer(turn("wait"), rid, progress))
    await until(engine.running)
    assert await ask(engine, turn("hello"))
    assert (progress.tokens, task.done()) == (0, False)
    await engine.abort(rid)
    with pytest.raises(asyncio.CancelledError):
        await task


def test_poison_kills_the_process():
    program = """
import asyncio
from turnmill.turn import Turn
from turnmill_worker.engines.base import EngineSettings, Progress
from turnmill_worker.engines.sim import build
engine = build(EngineSettings(arguments=("--kill-if", "poison")))
turn = Turn(model="sim", messages=[{"role": "user", "content": "poison"}])
asyncio.run(engine.answer(turn, "1", Progress()))
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL


async def test_closing_ends_its_turns_and_may_be_done_twice(sim: Make):
    engine = sim("--hang-if", "wait")
    task = asyncio.create_task(ask(engine, turn("wait")))
    await until(engine.running)
    engine.close()
    engine.close()
    with pytest.raises(EngineDied):
        await task
