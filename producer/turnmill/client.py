"""For services: submit turns, wait for them, read what is stored.

One Client serves thousands of waiters: asks of the same moment travel in one ENQUEUE, and one reader per
model follows the stream of finished turns. A slow poll, which is ENQUEUE again, finds what the stream
may have missed and puts back what Redis may have lost.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import random
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from pydantic_core import to_json
from redis.exceptions import RedisError

from turnmill.errors import ClientClosed, OtherDraw, RecordError, TurnmillError, UsageError
from turnmill.faults import passes, patiently, translate
from turnmill.holdings import Holdings
from turnmill.queue import (
    BATCH_BYTES,
    BATCH_TURNS,
    GREATEST_WEIGHT,
    LEAST_WEIGHT,
    Ask,
    Depth,
    Draw,
    Lane,
    Queue,
    State,
)
from turnmill.reading import Delta, Listener
from turnmill.reply import Reply, Trace
from turnmill.settings import Farm, check_name
from turnmill.store import READ_BATCH, BenchedWorker, Ending, RunInfo, Store, WorkerInfo
from turnmill.tasks import end_tasks
from turnmill.turn import Turn
from turnmill.wire import encode_turn

log = logging.getLogger("turnmill.client")

POLL_SECONDS = 20.0
STREAM_BLOCK_MS = 1000
STREAM_READ = 5000

Result = TypeVar("Result")


@dataclass(eq=False)
class _Pending:
    """A turn that somebody here waits for."""

    turn: Turn
    ask: Ask
    state: asyncio.Future[State]
    ending: asyncio.Future[Ending]


@dataclass(frozen=True)
class FarmStatus:
    """A farm at a glance: workers that live, those on the bench, depth of each model's queue, counters of
    each run."""

    workers: list[WorkerInfo]
    benched: list[BenchedWorker]
    queues: dict[str, Depth]
    runs: list[RunInfo]

    def to_json(self) -> str:
        return to_json(self).decode()


@dataclass
class _Lane:
    """What a Client keeps of one model: asks not yet sent, and the task that follows its stream."""

    unsent: list[_Pending] = field(default_factory=list)
    flush: asyncio.Task[None] | None = None
    reader: asyncio.Task[None] | None = None


class Client:
    """An asynchronous client, bound to the event loop that it is entered in.

    `url`, `namespace`: else `REDIS_URL`, `TURNMILL_NAMESPACE`. `run`: the run that its turns belong to.
    `priority`: 0 to 9, larger first. `weight`: share beside runs of equal priority. `deadline`: seconds
    until a turn is given up. `patience`: seconds to go on trying while Redis is away or full (None: for
    ever).

    Methods raise UsageError, RedisUnusable, ClientClosed, and QueueFull or RedisAway when patience ends.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        namespace: str | None = None,
        run: str = "adhoc",
        priority: int = 5,
        weight: float = 1.0,
        deadline: float | None = None,
        patience: float | None = 60.0,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        if type(priority) is not int or not 0 <= priority <= 9:
            raise UsageError(f"priority {priority}: a whole number from 0 to 9")
        if not LEAST_WEIGHT <= weight <= GREATEST_WEIGHT:
            raise UsageError(
                f"weight {weight}: must be a number from {LEAST_WEIGHT:g} to {GREATEST_WEIGHT:g}"
            )
        if deadline is not None and not 0.001 <= deadline < math.inf:
            raise UsageError(f"deadline {deadline}: seconds, at least 0.001")
        self.farm = Farm.from_environment(url, namespace)
        self.lane = Lane(check_name(run, "run"), priority, weight, deadline)
        self._patience, self._poll_seconds = patience, poll_seconds
        self._redis = self.farm.connect()
        self.store = Store(self._redis, self.farm.keys)
        self.queue = Queue(self._redis, self.farm.keys)
        self._pending: dict[str, _Pending] = {}
        self._beside: set[_Pending] = set()
        self._lanes: dict[str, _Lane] = {}
        self._listeners: dict[str, Listener] = {}
        self._poller: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop waiting: who waits gets ClientClosed. Turns that were submitted stay submitted."""
        self._closed = True
        lanes = self._lanes.values()
        await end_tasks([self._poller, *(t for lane in lanes for t in (lane.flush, lane.reader))])
        for listener in self._listeners.values():
            await listener.end()
        for pending in [*self._pending.values(), *self._beside]:
            self._drop(pending, ClientClosed("the Client was closed while this waited"))
        await self._redis.aclose(close_connection_pool=True)

    # Asking

    async def submit(self, turn: Turn, *, going: bool = False, retry_failed: bool = False) -> str:
        """Put one turn into the queue; returns its hash once it is there (or answered already).

        `going`: the next turn of a conversation that is under way; it goes ahead of new ones.
        `retry_failed`: ask again also what failed for good (poison, invalid request).
        """
        pending = self._ask(turn, going=going, retry_failed=retry_failed)
        await asyncio.shield(pending.state)
        return turn.hash

    async def submit_stating(
        self,
        turn: Turn,
        *,
        going: bool = False,
        retry_failed: bool = False,
        stream: bool = False,
        draw: Draw | None = None,
    ) -> State:
        """As `submit`; returns the state in which the ask found the turn. `stream`: it will be read by `stream`. `draw`:
        which draw it is, where Redis is to say. Raises OtherDraw if it is another one: nothing was submitted then."""
        pending = self._ask(turn, going=going, retry_failed=retry_failed, stream=stream, draw=draw)
        return await asyncio.shield(pending.state)

    async def submit_many(self, turns: Iterable[Turn], *, retry_failed: bool = False) -> list[str]:
        """Put many turns into the queue; returns their hashes, in order."""
        asked = []
        for turn in turns:
            asked.append(self._ask(turn, retry_failed=retry_failed))
            if len(asked) % BATCH_TURNS == 0:
                await asyncio.sleep(0)  # Redis takes these while the next are made
        for pending in asked:
            await asyncio.shield(pending.state)
        return [pending.ask.hash for pending in asked]

    async def ask(self, turn: Turn, *, going: bool = False, retry_failed: bool = False) -> Ending:
        """Submit one turn and wait until it has ended."""
        pending = self._ask(turn, going=going, retry_failed=retry_failed)
        return await self._ending(pending)

    async def ask_stating(
        self, turn: Turn, *, going: bool = False, retry_failed: bool = False, fresh: bool = True
    ) -> tuple[State, Ending]:
        """As `ask`, with the state in which the ask found the turn: `answered` came from the store. Not
        `fresh`: an earlier failure or cancel is over for nobody, and is the ending."""
        pending = self._ask(turn, fresh=fresh, going=going, retry_failed=retry_failed)
        ending = await self._ending(pending)
        return await pending.state, ending

    async def stream(
        self, turn: Turn, *, going: bool = False, retry_failed: bool = False
    ) -> AsyncGenerator[Delta | Ending, None]:
        """Submit one turn, and read its answer while it grows: pieces of its content, which joined are the beginning of
        the reply's; last its ending. Who stops reading leaves the turn in the queue.

        There are no pieces of an answer that could not go on elsewhere if its worker died, or that may become a tool call;
        nor of one that was there already. Raises StreamBroken if the turn had to be begun again after pieces were read.
        """
        pending = self._ask(turn, going=going, retry_failed=retry_failed, stream=True)
        if await asyncio.shield(pending.state) == "answered":
            yield await self._ending(pending)
            return
        listener = self._listeners.get(turn.model)
        if listener is None:
            listener = Listener(self._redis, self.farm.keys, turn.model)
            self._listeners[turn.model] = listener
        reading = listener.open(turn.hash)
        pending.ending.add_done_callback(reading.wake)
        try:
            while True:
                if new := reading.take():
                    yield Delta(new)
                elif pending.ending.done():
                    break
                else:
                    await reading.wait()
        finally:
            pending.ending.remove_done_callback(reading.wake)
            listener.close(reading)
        ending = await self._ending(pending)
        if isinstance(ending, Reply):
            content = ending.message.content
            reading.check(content if isinstance(content, str) else "")
        yield ending

    async def wait(self, hash: str, timeout: float | None = None) -> Ending:
        """Wait until a turn has ended. It may have been submitted by anybody. Raises TimeoutError, and
        UsageError when nothing is known of that hash."""
        pending = self._pending.get(hash)
        if pending is None:
            endings = await self._read(lambda: self.store.endings(self.lane.run, [hash]))
            if hash in endings:
                return endings[hash]
            turn = await self._read(lambda: self.store.turn(hash))
            if turn is None:
                raise UsageError(f"no turn {hash} is known here")
            pending = self._ask(turn, fresh=False)
        return await asyncio.wait_for(self._ending(pending), timeout)

    async def as_ended(
        self, hashes: Sequence[str], timeout: float | None = None
    ) -> AsyncGenerator[tuple[str, Ending]]:
        """Hashes and endings, in the order in which they end. Raises TimeoutError."""

        async def named(hash: str) -> tuple[str, Ending]:
            return hash, await self.wait(hash)

        tasks = [asyncio.ensure_future(named(hash)) for hash in hashes]
        try:
            for next_one in asyncio.as_completed(tasks, timeout=timeout):
                yield await next_one
        finally:
            await end_tasks(tasks)

    async def wait_many(
        self, hashes: Sequence[str], timeout: float | None = None
    ) -> dict[str, Ending]:
        """Endings by hash, in the order of the hashes, once all have ended. Raises TimeoutError."""
        async with contextlib.aclosing(self.as_ended(hashes, timeout)) as ended:
            endings = {hash: ending async for hash, ending in ended}
        return {hash: endings[hash] for hash in hashes}

    @property
    def waiting(self) -> list[str]:
        """The turns that somebody waits for here, by hash."""
        return list(self._pending)

    async def cancel(self, hashes: Sequence[str]) -> int:
        """Leave these turns. One that another run wants goes on for that run; of others the worker is
        told. Returns how many were left: those that had ended are not counted."""
        left = 0
        by_model: dict[str, list[str]] = {}
        for hash in hashes:
            pending = self._pending.get(hash)
            turn = pending.turn if pending else await self._read(partial(self.store.turn, hash))
            if turn is not None:
                by_model.setdefault(turn.model, []).append(hash)
        for model, of_model in by_model.items():
            for start in range(0, len(of_model), BATCH_TURNS):
                some = of_model[start : start + BATCH_TURNS]
                left += await self._read(partial(self.queue.cancel, model, self.lane.run, some))
                # Who asks for them again from now on asks afresh.
                await self._resolve([hash for hash in some if hash in self._pending])
        return left

    async def forget(self, hashes: Sequence[str]) -> int:
        """Drop the stored answers (replies or failures) of these turns, for every run that holds them: who
        asks again, gets a new one. Open turns are left alone. Returns how many were dropped."""
        self._check_usable()
        holdings = Holdings(self._redis, self.farm.keys, self._patience)
        return sum(one.state == "dropped" for one in await holdings.forget_answers(hashes))

    # Reading

    async def result(self, hash: str) -> Ending | None:
        """How a turn ended; None while it is open or unknown."""
        return (await self._read(lambda: self.store.endings(self.lane.run, [hash]))).get(hash)

    async def reply(self, hash: str) -> Reply | None:
        return await self._read(lambda: self.store.reply(hash))

    async def trace(self, hash: str) -> Trace | None:
        """How a turn was answered, or why it was not; None while it is open or unknown."""
        return await self._read(lambda: self.store.trace(hash))

    async def status(self) -> FarmStatus:
        async def read() -> FarmStatus:
            workers = await self.store.workers()
            models = sorted({*await self.store.models(), *(worker.model for worker in workers)})
            queues = {model: await self.queue.depth(model) for model in models}
            benched = await self.store.benched()
            return FarmStatus(workers, benched, queues, await self.store.runs())

        return await self._read(read)

    async def _read(self, attempt: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        self._check_usable()
        return await patiently(attempt, patience=self._patience, doing="reading the farm")

    def _check_usable(self) -> None:
        if self._closed:
            raise ClientClosed("the Client is closed")
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._loop is not loop:
            raise UsageError("a Client belongs to the event loop in which it was first used")

    # One ENQUEUE for all asks of a moment

    def _ask(
        self,
        turn: Turn,
        *,
        fresh: bool = True,
        going: bool = False,
        retry_failed: bool = False,
        stream: bool = False,
        draw: Draw | None = None,
    ) -> _Pending:
        self._check_usable()
        waited_for = self._pending.get(turn.hash)
        if waited_for is not None and waited_for.ending.done():
            waited_for = None
        if waited_for is not None and draw is None:
            if stream and not waited_for.ask.stream:
                waited_for.ask = replace(waited_for.ask, stream=True)
                if waited_for.state.done():
                    self._send(turn.model, [waited_for])
            return waited_for
        loop = asyncio.get_running_loop()
        ask = Ask(turn.hash, encode_turn(turn), fresh, going, retry_failed, stream, draw)
        ending = waited_for.ending if waited_for else loop.create_future()
        pending = _Pending(turn, ask, loop.create_future(), ending)
        if waited_for is None:
            self._pending[turn.hash] = pending
        else:  # which draw it is has to be said all the same
            self._beside.add(pending)
            pending.state.add_done_callback(lambda _: self._beside.discard(pending))
        self._send(turn.model, [pending])
        if self._poller is None:
            self._poller = loop.create_task(self._poll())
        return pending

    async def _ending(self, pending: _Pending) -> Ending:
        return await asyncio.shield(pending.ending)

    def _send(self, model: str, pending: list[_Pending]) -> None:
        lane = self._lanes.setdefault(model, _Lane())
        lane.unsent += pending
        if lane.flush is None or lane.flush.done():
            lane.flush = asyncio.get_running_loop().create_task(self._flush(model, lane))

    async def _flush(self, model: str, lane: _Lane) -> None:
        """Send what is unsent. Tasks that are ready now have their say first: it is one batch."""
        await asyncio.sleep(0)
        while lane.unsent:
            batch = _take_batch(lane.unsent)
            try:
                await self._enqueue(model, lane, batch)
            except Exception as error:
                # Whatever it is: they wait for an answer, and the next batch is not to blame.
                for pending in batch:
                    self._drop(pending, error)

    async def _enqueue(self, model: str, lane: _Lane, batch: list[_Pending]) -> None:
        asks = [pending.ask for pending in batch]
        position, states = await patiently(
            lambda: self.queue.enqueue(model, asks, self.lane),
            patience=self._patience,
            doing=f"enqueuing turns ({len(asks)})",
        )
        if lane.reader is None or lane.reader.done():
            lane.reader = asyncio.get_running_loop().create_task(self._follow(model, position))
        ended, again = [], []
        for pending, asked, state in zip(batch, asks, states, strict=True):
            # From now on it is only polled for: asking afresh again would undo a cancel.
            pending.ask = replace(pending.ask, body=b"", fresh=False, retry_failed=False, draw=None)
            if isinstance(state, int):
                self._drop(pending, OtherDraw(state))
                continue
            if state == "unknown":
                pending.ask = replace(pending.ask, body=encode_turn(pending.turn))
                again.append(pending)
            elif pending.ask.stream and not asked.stream:  # somebody wants to read it meanwhile
                again.append(pending)
            if state != "unknown" and not pending.state.done():
                pending.state.set_result(state)
            if state in ("answered", "failed", "cancelled", "deadline"):
                ended.append(pending.ask.hash)
        if ended:
            await self._resolve(ended)
        if again:
            self._send(model, again)

    # Hearing that turns have ended

    async def _follow(self, model: str, position: str) -> None:
        """Follow a model's stream of finished turns, for all who wait here."""
        key = self.farm.keys.finished(model)
        while True:
            try:
                streams = await self._redis.xread(
                    {key: position}, count=STREAM_READ, block=STREAM_BLOCK_MS
                )
                for _, entries in streams:
                    hashes = {entry[b"h"].decode() for _, entry in entries} & self._pending.keys()
                    await self._resolve(list(hashes))
                    position = entries[-1][0]
            except (RedisError, OSError) as error:
                if not passes(error) and isinstance(error, RedisError):
                    self._fail_all(model, translate(error))
                    return
                await asyncio.sleep(0.1)

    async def _poll(self) -> None:
        """Ask again, slowly, for all that is waited for."""
        while True:
            await asyncio.sleep(self._poll_seconds * random.uniform(0.8, 1.2))
            by_model: dict[str, list[_Pending]] = {}
            for pending in self._pending.values():
                if pending.state.done():
                    by_model.setdefault(pending.turn.model, []).append(pending)
            for model, waiting in by_model.items():
                self._send(model, waiting)

    async def _resolve(self, hashes: list[str]) -> None:
        # By the page: what was read stays read, so that it ends even if Redis never answers for long.
        for start in range(0, len(hashes), READ_BATCH):
            await self._resolve_page(hashes[start : start + READ_BATCH])

    async def _resolve_page(self, hashes: list[str]) -> None:
        try:
            endings = await patiently(
                lambda: self.store.endings(self.lane.run, hashes),
                patience=self._patience,
                doing=f"reading {len(hashes)} replies",
            )
        except TurnmillError as error:
            # One record that cannot be read must not take the others with it.
            if len(hashes) == 1:
                if isinstance(error, RecordError):
                    error = type(error)(f"turn {hashes[0]}: {error}")
                if hashes[0] in self._pending:
                    self._drop(self._pending[hashes[0]], error)
                return
            for hash in hashes:
                await self._resolve_page([hash])
            return
        for hash, ending in endings.items():
            pending = self._pending.pop(hash, None)
            if pending is None:
                continue
            if not pending.state.done():
                pending.state.set_result("answered" if isinstance(ending, Reply) else "failed")
            if not pending.ending.done():
                pending.ending.set_result(ending)

    def _drop(self, pending: _Pending, error: Exception) -> None:
        futures: list[asyncio.Future[Any]] = [pending.state]
        if self._pending.get(pending.ask.hash) is pending:
            del self._pending[pending.ask.hash]
            futures.append(pending.ending)
        for future in futures:
            if not future.done():
                future.set_exception(error)
                future.exception()  # whoever waits still gets it; nobody waiting is no error

    def _fail_all(self, model: str, error: Exception) -> None:
        for pending in [p for p in self._pending.values() if p.turn.model == model]:
            self._drop(pending, error)


def _take_batch(unsent: list[_Pending]) -> list[_Pending]:
    size, count = 0, 0
    for pending in unsent[:BATCH_TURNS]:
        size += len(pending.ask.body)
        if count and size > BATCH_BYTES:
            break
        count += 1
    batch = unsent[:count]
    del unsent[:count]
    return batch


class BlockingClient:
    """A Client for code without an event loop: the same calls, each returning when it is done.

    It runs a Client in a thread of its own and may be used from any thread. Arguments as for Client.
    """

    def __init__(self, url: str | None = None, **options: Any) -> None:
        self._client = Client(url, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="turnmill-client", daemon=True
        )
        self._thread.start()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def submit(self, turn: Turn) -> str:
        return self._run(self._client.submit(turn))

    def submit_many(self, turns: Iterable[Turn]) -> list[str]:
        return self._run(self._client.submit_many(turns))

    def ask(self, turn: Turn) -> Ending:
        return self._run(self._client.ask(turn))

    def wait(self, hash: str, timeout: float | None = None) -> Ending:
        return self._run(self._client.wait(hash, timeout))

    def wait_many(self, hashes: Sequence[str], timeout: float | None = None) -> dict[str, Ending]:
        return self._run(self._client.wait_many(hashes, timeout))

    def cancel(self, hashes: Sequence[str]) -> int:
        return self._run(self._client.cancel(hashes))

    def forget(self, hashes: Sequence[str]) -> int:
        return self._run(self._client.forget(hashes))

    def result(self, hash: str) -> Ending | None:
        return self._run(self._client.result(hash))

    def reply(self, hash: str) -> Reply | None:
        return self._run(self._client.reply(hash))

    def trace(self, hash: str) -> Trace | None:
        return self._run(self._client.trace(hash))

    def status(self) -> FarmStatus:
        return self._run(self._client.status())

    def _run(self, call: Coroutine[Any, Any, Result]) -> Result:
        if self._closed:
            call.close()
            raise ClientClosed("the Client is closed")
        try:
            return asyncio.run_coroutine_threadsafe(call, self._loop).result()
        except concurrent.futures.CancelledError:
            raise ClientClosed("the Client was closed while this waited") from None

    async def _end(self) -> None:
        """Close the Client, and leave no other thread waiting for its call."""
        await self._client.close()
        await end_tasks(asyncio.all_tasks() - {asyncio.current_task()})
