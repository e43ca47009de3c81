"""The worker's command line: `turnmill worker`, or `python -m turnmill_worker`.

Exit codes: 0 drained; 2 configuration; 70 the engine died, start me again.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import sys
from typing import NoReturn

import click
import uvloop
from redis.exceptions import RedisError

from turnmill.cli.engine_arguments import WithEngine
from turnmill.errors import UsageError
from turnmill.settings import Farm
from turnmill_worker.bench import Bench, Station
from turnmill_worker.engines import ENGINES, load
from turnmill_worker.engines.base import Engine, EngineSettings
from turnmill_worker.http import HttpServer
from turnmill_worker.restart import supervise, the_worker
from turnmill_worker.settings import WorkerSettings
from turnmill_worker.worker import ENGINE_DIED, TurnWorker

log = logging.getLogger("turnmill.worker")

CONFIGURATION = 2


@click.command(cls=WithEngine)
@click.option("--engine", "engine_name", required=True, type=click.Choice(sorted(ENGINES)))
@click.option("--model", help="Path or id of the model.")
@click.option("--served-name", help="The name that turns ask for. [the model's]")
@click.option("--revision", help="Revision of the model.")
@click.option(
    "--slots", type=click.IntRange(min=1), help="Turns at once. [what the engine can hold]"
)
@click.option(
    "--lease", default=10.0, show_default=True, help="Seconds; the farm's first worker sets it."
)
@click.option(
    "--drain", default=30.0, show_default=True, help="Seconds for running turns to end on SIGTERM."
)
@click.option(
    "--stalled-after",
    default=120.0,
    show_default=True,
    help="Seconds until a silent engine is dead.",
)
@click.option(
    "--keep-every",
    default=5.0,
    show_default=True,
    help="Seconds between two looks at growing answers: as much is lost with a worker at most.",
)
@click.option(
    "--http",
    "http_address",
    metavar="[HOST:]PORT",
    help="Serve /health, /ready and /metrics there; the host is 127.0.0.1 unless given.",
)
@click.option("--restart", is_flag=True, help="Start the worker again whenever it dies.")
@click.option("--redis-url", envvar="REDIS_URL", help="redis://, rediss:// or unix://. [REDIS_URL]")
@click.option("--namespace", envvar="TURNMILL_NAMESPACE", help="Prefix of all keys. [turnmill]")
@click.argument("engine_arguments", nargs=-1, type=click.UNPROCESSED)
def worker(
    engine_name: str,
    model: str | None,
    served_name: str | None,
    revision: str | None,
    slots: int | None,
    lease: float,
    drain: float,
    stalled_after: float,
    keep_every: float,
    http_address: str | None,
    restart: bool,
    redis_url: str | None,
    namespace: str | None,
    engine_arguments: tuple[str, ...],
) -> None:
    """Take turns from the queue into one engine. Everything after -- goes to the engine."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("arq").setLevel(logging.WARNING)
    try:
        if restart:
            sys.exit(supervise(the_worker(sys.argv[1:])))
        settings = WorkerSettings(
            lease=lease, drain=drain, stalled_after=stalled_after, keep_every=keep_every
        )
        farm = Farm.from_environment(redis_url, namespace)
        farm.pool(connections=1)  # a bad URL is seen now, not after minutes of loading a model
        http = HttpServer(http_address) if http_address else None
    except UsageError as error:
        _end(CONFIGURATION, f"turnmill worker: {error}")
    bench = Bench(farm, Station.here(engine_name, served_name or model))
    bench.wait()
    try:
        build = load(engine_name)
        engine = build(EngineSettings(model, served_name, revision, slots, engine_arguments))
    except UsageError as error:
        _end(CONFIGURATION, f"turnmill worker: {error}")
    except Exception as error:
        log.exception("the engine did not start")
        bench.record(f"the engine did not start: {error}")
        _end(ENGINE_DIED, f"turnmill worker: the engine did not start: {error}")
    sys.exit(serve(engine, farm, settings, bench, http))


def serve(
    engine: Engine,
    farm: Farm,
    settings: WorkerSettings,
    bench: Bench,
    http: HttpServer | None = None,
) -> int:
    """Run a worker around an engine until it has drained or died. Returns its exit code."""
    # The engine is there before this loop: an engine that found a running loop would take it for its own.
    _spare_the_collector()
    with contextlib.closing(uvloop.new_event_loop()) as loop:
        asyncio.set_event_loop(loop)
        turn_worker = TurnWorker(engine, farm, settings, crashed=bench.record)
        if http is not None:
            http.watch(turn_worker)
        code = CONFIGURATION
        try:
            turn_worker.run()
            code = turn_worker.exit_code
        except RedisError as error:
            print(f"turnmill worker: Redis refuses: {error}", file=sys.stderr)
        finally:
            engine.close()
    if code == ENGINE_DIED:
        if turn_worker.crash:
            bench.record(turn_worker.crash)
        # What is left of a dead engine may hold threads that never end.
        sys.stderr.flush()
        os._exit(code)
    return code


def _spare_the_collector() -> None:
    """An engine is millions of objects that live as long as it does: looking through them all, again and again,
    would stop the loop each time. And turns leave little behind that only the collector can free."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def _end(code: int, text: str) -> NoReturn:
    print(text, file=sys.stderr)
    sys.exit(code)


def main() -> None:
    worker(prog_name="turnmill worker")
