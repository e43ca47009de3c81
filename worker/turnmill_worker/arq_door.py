"""The door for stock arq clients: `enqueue_job("answer_turn", {...}, _queue_name="NAMESPACE:q:MODEL:due")`.

CLAIM hands due jobs to a worker, again and again until they have a result: a worker that dies between two steps
leaves nothing undone. A job is a turn like any other; when the turn has ended, its result is written as arq would.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from arq.constants import job_key_prefix, result_key_prefix, retry_key_prefix
from arq.jobs import JobDef, deserialize_job, serialize_result
from arq.utils import to_unix_ms
from pydantic import ValidationError
from redis.asyncio import Redis

from turnmill.errors import TurnmillError, UsageError
from turnmill.keys import Keys
from turnmill.queue import Ask, Lane, Queue
from turnmill.reply import Reply
from turnmill.settings import check_name
from turnmill.store import Ending, Store
from turnmill.turn import Turn, explain
from turnmill.wire import encode_turn
from turnmill_worker.exchange import FAULTS

log = logging.getLogger("turnmill.worker")

FUNCTION = "answer_turn"
RUN = "arq"
KEEP_RESULT_SECONDS = 3600
"""As arq does unless told otherwise."""
KNOWN_SECONDS = 86_400
"""How long FINISH looks for jobs after the last was seen to. Every open job is seen to every few seconds."""
_SAMPLE_DIGITS = 12


@dataclass(frozen=True)
class _Codec:
    """How a client writes its jobs, and reads their results."""

    name: str

    @classmethod
    def of(cls, record: bytes) -> _Codec:
        return cls("pickle" if record[:1] == b"\x80" else "json")

    def load(self, record: bytes) -> Any:
        if self.name == "json":
            return json.loads(record)
        return _PlainUnpickler(io.BytesIO(record)).load()

    def dump(self, value: Any) -> bytes:
        return json.dumps(value).encode() if self.name == "json" else pickle.dumps(value)

    def failure(self, text: str) -> Any:
        """What a result says of a job that failed: arq raises it in the client if it can."""
        return text if self.name == "json" else RuntimeError(text)


class _PlainUnpickler(pickle.Unpickler):
    """Reads what arq's default serializer writes of plain values. Nothing is imported, so no code can be run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a job may hold plain values only, not {module}.{name}")


class ArqDoor:
    """Sees to the jobs of one model's queue."""

    def __init__(self, redis: Redis, keys: Keys, model: str) -> None:
        self._redis, self._keys, self._model = redis, keys, model
        self._queue, self._store = Queue(redis, keys), Store(redis, keys)

    async def tend(self, jobs: Sequence[str]) -> None:
        """One step for each of these jobs. What Redis prevents is done when they come again."""
        for job in jobs:
            try:
                await self._tend(job)
            except FAULTS as error:
                log.debug("arq job %s cannot be seen to now: %s", job, error)

    async def _tend(self, job: str) -> None:
        record = await self._redis.get(job_key_prefix + job)
        if record is None:  # cancelled, or expired
            await self._redis.zrem(self._keys.due(self._model), job)
            return
        codec = _Codec.of(record)
        try:
            definition = deserialize_job(record, deserializer=codec.load)
        except Exception as error:
            cause = error.__cause__ or error
            log.warning("arq job %s cannot be read: %s", job, cause)
            nothing = {"f": FUNCTION, "a": (), "k": {}, "t": 1, "et": 0}
            definition = deserialize_job(b"", deserializer=lambda _: nothing)
            await self._end(job, codec, definition, failure=f"the job cannot be read: {cause}")
            return
        try:
            turn, lane = _turn(definition, job, self._model)
            ending = await self._ask(job, turn, lane)
        except FAULTS:
            raise
        except Exception as error:  # whatever a client has put there, it must not end the worker
            text = str(error) if isinstance(error, TurnmillError) else f"not a job: {error!r}"
            await self._end(job, codec, definition, failure=text)
            return
        if isinstance(ending, Reply):
            await self._end(job, codec, definition, result=ending.model_dump(exclude_none=True))
        elif ending is not None:
            await self._end(job, codec, definition, failure=f"{ending.kind}: {ending.text}")
        if ending is not None:
            await self._redis.srem(self._keys.jobs_of(turn.hash), job)  # type: ignore[misc]

    async def _ask(self, job: str, turn: Turn, lane: Lane) -> Ending | None:
        """How the turn has ended, if it has. The first time it is asked afresh, then only polled for."""
        await self._redis.set(self._keys.jobs(self._model), "1", ex=KNOWN_SECONDS)
        known = await self._redis.sismember(self._keys.jobs_of(turn.hash), job)  # type: ignore[misc]
        ask = Ask(turn.hash, encode_turn(turn), fresh=not known)
        await self._queue.enqueue(self._model, [ask], lane)
        await self._redis.sadd(self._keys.jobs_of(turn.hash), job)  # type: ignore[misc]
        # It may have ended before FINISH could know of this job.
        return (await self._store.endings(lane.run, [turn.hash])).get(turn.hash)

    async def _end(
        self,
        job: str,
        codec: _Codec,
        definition: JobDef,
        *,
        result: Any = None,
        failure: str | None = None,
    ) -> None:
        now = int(time.time() * 1000)
        record = serialize_result(
            definition.function,
            definition.args,
            definition.kwargs,
            definition.job_try or 1,
            to_unix_ms(definition.enqueue_time),
            failure is None,
            result if failure is None else codec.failure(failure),
            now,
            now,
            f"{job}:{definition.function}",
            self._keys.due(self._model),
            job,
            serializer=codec.dump,
        )
        pipe = self._redis.pipeline(transaction=True)
        if record is not None:
            pipe.set(result_key_prefix + job, record, ex=KEEP_RESULT_SECONDS)
        pipe.delete(job_key_prefix + job, retry_key_prefix + job)
        pipe.zrem(self._keys.due(self._model), job)
        await pipe.execute()


def _turn(definition: JobDef, job: str, model: str) -> tuple[Turn, Lane]:
    """The turn of a job: its one argument, an object of the fields of a turn. Raises UsageError."""
    if definition.function != FUNCTION:
        raise UsageError(f"no function {definition.function!r} here: {FUNCTION}")
    options = dict(definition.kwargs)
    run, priority = options.pop("run", RUN), options.pop("priority", 5)
    if options or len(definition.args) != 1 or not isinstance(definition.args[0], dict):
        raise UsageError(f"{FUNCTION} takes one object, the turn; and run, priority")
    if type(priority) is not int or not 0 <= priority <= 9:
        raise UsageError(f"priority {priority!r}: a whole number from 0 to 9")
    fields = {"model": model, **definition.args[0]}
    try:
        turn = Turn.model_validate(fields)
    except ValidationError as error:
        raise UsageError(explain(error)) from None
    if turn.model != model:
        raise UsageError(f"model {turn.model!r} was put into the queue of {model!r}")
    if not turn.shared and "sample" not in fields:
        # Two jobs are two draws, and the same job is the same one whenever it is looked at.
        digest = hashlib.sha256(job.encode()).hexdigest()
        turn = turn.model_copy(update={"sample": int(digest[:_SAMPLE_DIGITS], 16)})
    _ = turn.hash  # BadTurn, if it has none
    return turn, Lane(check_name(str(run), "run"), priority)
