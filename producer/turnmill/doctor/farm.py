"""Whether the turns of a farm will be answered: who serves what, and what waits for nobody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable

from pydantic import ValidationError
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from turnmill.doctor.check import Check, some
from turnmill.errors import NewerRecord, TurnmillError
from turnmill.faults import refuses
from turnmill.keys import Keys
from turnmill.queue import Depth, Queue
from turnmill.store import Store, WorkerInfo
from turnmill.wire import decode_turn

DUE_LOOKED_AT = 100
"""Turns of one model."""


async def examine(redis: Redis, keys: Keys) -> list[Check]:
    """All checks of a farm. What cannot be read is a check of its own; raises redis-py's errors where Redis goes
    away meanwhile."""
    store, queue = Store(redis, keys), Queue(redis, keys)

    async def look(name: str, find: Callable[[], Awaitable[list[Check]]]) -> list[Check]:
        try:
            return await find()
        except (ResponseError, TurnmillError, ValidationError, ValueError) as error:
            says = f"cannot be read: {' '.join(str(error).split())[:200]}"
            if refuses(error):
                return [Check(name, "warn", says, "look again as a user with more rights")]
            advice = f"something else than this turnmill wrote it: look at the keys {keys.prefix}*"
            return [Check(name, "bad", says, advice)]

    async def whole() -> list[Check]:
        workers = await store.workers()
        names = sorted({*await store.models(), *(worker.model for worker in workers)})
        depths = {name: await queue.depth(name) for name in names}
        return [
            serving(workers),
            engines(workers),
            unserved(depths, workers),
            suspects(depths),
            await newer(redis, keys, names),
        ]

    return [
        *await look("lease", lambda: _one(lease(redis, keys))),
        *await look("workers", whole),
        *await look("bench", lambda: _one(bench(store))),
    ]


async def _one(check: Awaitable[Check]) -> list[Check]:
    return [await check]


async def lease(redis: Redis, keys: Keys) -> Check:
    try:
        found = await redis.get(keys.lease)
    except NoPermissionError:
        return Check("lease", "ok", "not looked at: this user only asks, and it is workers' own")
    if found is None:
        return Check("lease", "ok", "not set yet: the first worker sets it")
    if not found.isdigit() or not int(found):
        advice = f"stop the workers and delete the key {keys.lease}"
        return Check("lease", "bad", f"{found.decode(errors='replace')!r} is no time", advice)
    return Check("lease", "ok", f"{int(found) / 1000:g} s: so long a dead worker's turns wait")


def serving(workers: list[WorkerInfo]) -> Check:
    if not workers:
        return Check("workers", "ok", "none lives")
    processes = {(worker.host, worker.pid) for worker in workers}  # one serves its adapters, too
    models = Counter(worker.model for worker in workers)
    each = some([f"{count} of {model}" for model, count in sorted(models.items())])
    draining = sum(worker.state == "draining" for worker in workers)
    return Check(
        "workers", "ok", f"{len(processes)}: {each}" + (f"; {draining} drain" if draining else "")
    )


def engines(workers: list[WorkerInfo]) -> Check:
    """Answers of unequal engines are not of one experiment."""
    by_model: dict[str, set[str]] = {}
    for worker in workers:
        one = worker.engine.model_dump_json(exclude_none=True)
        by_model.setdefault(worker.model, set()).add(one)
    mixed = sorted(model for model, found in by_model.items() if len(found) > 1)
    if mixed:
        advice = "compare version, dtype and template in status --json; use other --served-names"
        return Check("engines", "warn", f"unequal ones serve {some(mixed)}", advice)
    return Check("engines", "ok", "of each model alike" if workers else "no worker, no engine")


def unserved(depths: dict[str, Depth], workers: list[WorkerInfo]) -> Check:
    served = {worker.model for worker in workers if worker.state == "serving"}
    waiting = {model: depth.queued + depth.due + depth.suspects for model, depth in depths.items()}
    names = [
        f"{count} of {name}" for name, count in waiting.items() if count and name not in served
    ]
    if names:
        advice = "start a worker, or compare its --served-name with what the runs ask for"
        return Check("queues", "bad", f"turns wait for nobody: {some(names)}", advice)
    total = sum(waiting.values())
    says = f"{total} turns wait, each for a live worker" if total else "no turn waits"
    return Check("queues", "ok", says)


def suspects(depths: dict[str, Depth]) -> Check:
    found = [f"{depth.suspects} of {name}" for name, depth in depths.items() if depth.suspects]
    if found:
        advice = "read the log of the workers that died; docs/operations.md, Poison turns"
        return Check("suspects", "warn", f"workers died with these turns: {some(found)}", advice)
    return Check("suspects", "ok", "none")


async def newer(redis: Redis, keys: Keys, models: list[str]) -> Check:
    """Turns that only a newer turnmill can read are offered again and again: they are among those that are due."""
    count = 0
    for model in models:
        hashes = [raw.decode() for raw in await redis.zrange(keys.due(model), 0, DUE_LOOKED_AT - 1)]
        for data in await redis.mget([keys.body(hash) for hash in hashes]) if hashes else ():
            try:
                decode_turn(data or b"")
            except NewerRecord:
                count += 1
            except TurnmillError:
                pass  # it ends as a failure when it is claimed
    if count:
        says = f"{count} turns, or more, were asked by a newer turnmill"
        return Check("versions", "warn", says, "upgrade a worker of their model: they wait for it")
    return Check("versions", "ok", "no record is newer than this turnmill")


async def bench(store: Store) -> Check:
    benched = await store.benched()
    if benched:
        named = some([f"{one.host}:{one.pid} ({one.why})" for one in benched], most=2)
        advice = "read its log: it crashed three times in ten minutes, and waits"
        return Check("bench", "warn", f"{len(benched)} workers: {named}", advice)
    return Check("bench", "ok", "no worker had to be set aside")
