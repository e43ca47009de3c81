"""A thread that owns an engine's event loop, from before the engine is built until it is closed.

Engines with an asyncio interface are bound to one loop: the one that they were built beside. Here
that loop runs on a thread of its own, for the engine's whole life, and everybody else hands it
coroutines. Nothing is serialized: a hundred submitted coroutines are a hundred tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

log = logging.getLogger("turnmill.engines.loop")

_JOIN_SECONDS = 30.0
"""How long `stop` waits for tasks to take their cancellation before it leaves the thread behind."""


class LoopThread:
    """A daemon thread named `name`: first `call`s, in which an engine is built; then its loop.

    >>> thread = LoopThread("some-engine-loop")
    >>> engine = thread.call(make_engine)
    >>> thread.run(engine.loop)
    >>> thread.submit(engine.answer("Hello")).result()
    >>> thread.stop()

    The engine is built on the thread that will run its loop, so that it gets mixed up with no other
    thread's loop, signal handlers or life time. `ended` makes what callers get once the loop has
    ended, whatever ended it.
    """

    def __init__(
        self, name: str, ended: Callable[[], BaseException] = lambda: RuntimeError("it has ended")
    ) -> None:
        self.name = name
        self._ended = ended
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: set[Future[Any]] = set()
        self._refusal: Callable[[], BaseException] | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def running(self) -> bool:
        """Whether the loop was started: coroutines may be submitted, and `call` is over."""
        return self._loop is not None

    def call(self, function: Callable[[], T]) -> T:
        """Run a plain function on the thread, before its loop runs, and return its result."""
        if self.running:
            raise RuntimeError(f"{self.name} runs its loop: submit a coroutine")
        result: Future[T] = Future()

        def work() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        self._calls.put(work)
        return result.result()

    def run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the loop, for good."""
        self._loop = loop
        self._calls.put(None)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop. Callable from any thread, and from any loop (await the result
        with `asyncio.wrap_future`). Cancelling the future cancels the coroutine. After `fail` or
        `stop` the future has failed already."""
        future: Future[T] = Future()
        with self._lock:
            refusal = self._refusal
            if refusal is None:
                self._waiting.add(future)
        if refusal is not None:
            coroutine.close()
            future.set_exception(refusal())
            return future
        future.add_done_callback(self._forget)
        if not self.call_soon(self._start, coroutine, future):
            coroutine.close()
            _settle(future, self._ended())
        return future

    def call_soon(self, callback: Callable[..., object], *args: object) -> bool:
        """Call a plain function on the loop, soon. Says whether there is a loop that can."""
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # it is closed
            return False
        return self._loop is not None

    def fail(self, error: Callable[[], BaseException]) -> None:
        """Give up: every future that waits fails now with a fresh `error()`, and so does every later
        one. Works from any thread, and without the loop's help, so also when that is stuck."""
        with self._lock:
            if self._refusal is None:
                self._refusal = error
            waiting, self._waiting = self._waiting, set()
        for future in waiting:
            _settle(future, error())

    def stop(self) -> bool:
        """End the loop and the thread. What still runs is cancelled and waited for, what waits for it
        fails. May be called twice. Says whether the thread has ended."""
        self.fail(self._ended)
        if self._loop is None:
            self._calls.put(None)
        else:
            self.call_soon(self._loop.stop)
        self._thread.join(_JOIN_SECONDS)
        if self.alive:
            log.warning("%s does not end; it is left behind", self.name)
        return not self.alive

    def _work(self) -> None:
        while call := self._calls.get():
            call()
        loop = self._loop
        if loop is None:
            return
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        except BaseException:
            log.exception("%s broke", self.name)
        finally:
            self.fail(self._ended)
            _finish_all(loop)
            loop.close()
            asyncio.set_event_loop(None)

    def _start(self, coroutine: Coroutine[Any, Any, T], future: Future[T]) -> None:
        """On the loop: make the task and tie it to its future, both ways."""
        assert self._loop is not None
        if future.done():  # cancelled, or failed, before it began
            coroutine.close()
            return
        task = self._loop.create_task(coroutine)
        task.add_done_callback(lambda _: _copy(task, future))
        # A task of a future that is done for any other reason has nobody left who wants it.
        future.add_done_callback(lambda _: self.call_soon(task.cancel))

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._waiting.discard(future)


def _copy(task: asyncio.Task[T], future: Future[T]) -> None:
    if task.cancelled():
        future.cancel()
        return
    error = task.exception()
    if error is not None:
        _settle(future, error)
        return
    with contextlib.suppress(InvalidStateError):
        future.set_result(task.result())


def _settle(future: Future[Any], error: BaseException) -> None:
    """Fail a future, unless somebody was quicker."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)


def _finish_all(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what is left on a loop that has stopped, and run it to its end: a task that is dropped
    pending is reported as destroyed, and its cleanup never runs."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        # The results are looked at, so nothing is reported as never retrieved either.
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
