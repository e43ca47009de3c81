"""The loop thread, against a fake engine that keeps SGLang's contract: a loop of its own, async calls
that belong on it, and sync calls that drive it and so fail while it runs."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from turnmill_worker.engines.loop_thread import LoopThread

TOGETHER = 8
PATIENCE = 10.0


class FakeEngine:
    """Calls return only once all eight are inside: whoever lets in one after the other waits in vain."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.inside = 0
        self._all_inside = asyncio.Event()

    async def async_generate(self, number: int) -> int:
        assert asyncio.get_running_loop() is self.loop
        self.inside += 1
        try:
            if self.inside == TOGETHER:
                self._all_inside.set()
            await asyncio.wait_for(self._all_inside.wait(), PATIENCE)
        finally:
            self.inside -= 1
        return number

    def generate(self, number: int) -> int:
        call = self.async_generate(number)
        try:
            return self.loop.run_until_complete(call)
        finally:
            call.close()


class Gone(Exception):
    pass


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("fake-engine-loop", Gone)
    yield thread
    assert thread.stop()


@pytest.fixture
def engine(thread: LoopThread) -> FakeEngine:
    engine = thread.call(FakeEngine)
    thread.run(engine.loop)
    return engine


def test_calls_from_several_loops_and_threads_are_in_the_engine_together(
    thread: LoopThread, engine: FakeEngine
) -> None:
    answers: list[int] = []

    async def agenerate(number: int) -> None:
        answers.append(await asyncio.wrap_future(thread.submit(engine.async_generate(number))))

    async def two(first: int) -> None:
        await asyncio.gather(agenerate(first), agenerate(first + 1))

    def generate(number: int) -> None:
        answers.append(thread.submit(engine.async_generate(number)).result(PATIENCE))

    callers = [threading.Thread(target=asyncio.run, args=(two(first),)) for first in (0, 2, 4)]
    callers += [threading.Thread(target=generate, args=(number,)) for number in (6, 7)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(PATIENCE)
    assert sorted(answers) == list(range(TOGETHER))


async def test_the_fake_engine_finds_out_who_serializes(
    thread: LoopThread, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "PATIENCE", 0.01)
    lock = asyncio.Lock()

    async def one_at_a_time(number: int) -> int:
        async with lock:
            return await asyncio.wrap_future(thread.submit(engine.async_generate(number)))

    with pytest.raises(TimeoutError):
        await asyncio.gather(*map(one_at_a_time, range(TOGETHER)))


def test_the_engines_own_sync_call_fails_while_the_loop_runs(
    thread: LoopThread, engine: FakeEngine
) -> None:
    assert thread.submit(asyncio.sleep(0, "it runs")).result(PATIENCE) == "it runs"
    with pytest.raises(RuntimeError, match="his event loop is already running"):
        engine.generate(0)


def test_plain_calls_are_made_on_the_thread_before_its_loop_runs(thread: LoopThread) -> None:
    assert thread.call(threading.current_thread).name == "fake-engine-loop"
    engine = thread.call(FakeEngine)
    assert thread.call(lambda: engine.loop.run_until_complete(asyncio.sleep(0, "plain"))) == "plain"
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0)
    thread.run(engine.loop)
    with pytest.raises(RuntimeError, match="runs its loop"):
        thread.call(threading.current_thread)


async def test_cancelling_the_wait_cancels_the_call(thread: LoopThread, engine: FakeEngine) -> None:
    begun, cancelled = Future[None](), Future[None]()

    async def call() -> None:
        begun.set_result(None)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set_result(None)
            raise

    waiting = asyncio.ensure_future(asyncio.wrap_future(thread.submit(call())))
    await asyncio.wrap_future(begun)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.wait_for(asyncio.wrap_future(cancelled), PATIENCE)


def test_a_call_that_raises_raises_where_it_is_waited_for(
    thread: LoopThread, engine: FakeEngine
) -> None:
    async def call() -> None:
        raise LookupError("not here")

    with pytest.raises(LookupError, match="not here"):
        thread.submit(call()).result(PATIENCE)


def test_failing_ends_every_wait_at_once_and_refuses_new_calls(
    thread: LoopThread, engine: FakeEngine
) -> None:
    waiting = [thread.submit(engine.async_generate(number)) for number in range(TOGETHER - 1)]
    stuck, free = Future[None](), threading.Event()

    async def block() -> None:
        stuck.set_result(None)
        free.wait()

    waiting.append(thread.submit(block()))  # type: ignore[arg-type]
    stuck.result(PATIENCE)
    try:
        thread.fail(Gone)  # needs nothing of the loop, which is stuck
        errors = [future.exception(0) for future in waiting]
        assert [type(error) for error in errors] == [Gone] * TOGETHER
        assert len(set(map(id, errors))) == TOGETHER
        with pytest.raises(Gone):
            thread.submit(engine.async_generate(0)).result(0)
    finally:
        free.set()


def test_stopping_ends_calls_tasks_and_thread(
    thread: LoopThread, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    cleaned_up = Future[None]()

    async def background() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned_up.set_result(None)

    kept: list[asyncio.Task[None]] = []

    async def start() -> None:
        kept.append(asyncio.create_task(background()))

    thread.submit(start()).result(PATIENCE)
    call = thread.submit(engine.async_generate(0))
    with caplog.at_level(logging.DEBUG, "asyncio"):
        assert thread.stop()
        assert thread.stop()
        kept.clear()
        gc.collect()
    assert cleaned_up.done()
    assert not thread.alive
    assert engine.loop.is_closed()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    with pytest.raises(Gone):
        call.result(0)
    with pytest.raises(Gone):
        thread.submit(engine.async_generate(0)).result(0)


def test_a_loop_that_ends_by_itself_leaves_nobody_waiting(
    thread: LoopThread, engine: FakeEngine
) -> None:
    call = thread.submit(engine.async_generate(0))
    engine.loop.call_soon_threadsafe(engine.loop.stop)
    with pytest.raises(Gone):
        call.result(PATIENCE)


def test_a_thread_whose_loop_never_ran_can_be_stopped(thread: LoopThread) -> None:
    engine = thread.call(FakeEngine)
    assert thread.stop()
    engine.loop.close()
