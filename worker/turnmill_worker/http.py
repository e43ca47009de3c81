"""What a worker says of itself over HTTP: `/health`, `/ready`, and `/metrics` for Prometheus.

In threads of its own, so that it answers also while the worker's loop is blocked, and from numbers that are at
hand: only the depth of the queue is asked of Redis, beside the answers.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Protocol

from redis.exceptions import RedisError

from turnmill.errors import TurnmillError, UsageError
from turnmill.prometheus import CONTENT_TYPE, metric
from turnmill.queue import Depth, Queue
from turnmill.settings import Farm
from turnmill.store import WorkerInfo
from turnmill_worker.counters import Counters, Vitals
from turnmill_worker.pulse import CHECK_SECONDS, HEALTH_TIMEOUT

log = logging.getLogger("turnmill.worker")

DEFAULT_HOST: Final = "127.0.0.1"
CONNECTIONS: Final = 16
"""At once; more are refused, so that nobody can fill the worker with threads."""
CLIENT_SECONDS: Final = 5.0
"""How long a client may take to ask, and to read."""
DEPTH_SECONDS: Final = 5.0
"""How often the queue's depth is read, at most, and how long reading it may take."""
SILENT_SECONDS: Final = HEALTH_TIMEOUT + 2 * CHECK_SECONDS
"""An engine that was not seen alive for so long has let a health check pass: it is not ready."""

Answer = tuple[int, str, str]
"""Status, content type, text."""


class Watched(Protocol):
    """The worker, as it is seen from here. All may be called from any thread."""

    farm: Farm

    @property
    def counters(self) -> Counters: ...

    def vitals(self) -> Vitals: ...


class HttpServer:
    """Serves from the moment it is made; until it is given a worker, that is starting.

    Raises UsageError for an address that is none, or that is taken.
    """

    def __init__(self, address: str) -> None:
        host, port = _parse(address)
        self._worker: Watched | None = None
        self._depth: _DepthReader | None = None
        try:
            self._server = _Server((host, port), self.answer)
        except OSError as error:
            raise UsageError(f"--http {address}: {error.strerror or error}") from None
        self.port: int = self._server.server_address[1]
        log.info("http on %s port %d", host, self.port)
        threading.Thread(
            target=self._server.serve_forever, name="turnmill-http", daemon=True
        ).start()

    def watch(self, worker: Watched) -> None:
        """The engine is there, and this is its worker."""
        models = [info.model for info in worker.vitals().infos]
        self._depth = _DepthReader(worker.farm, models)
        self._worker = worker

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str) -> Answer:
        match path:
            case "/health":
                return _verdict(self._unhealthy())
            case "/ready":
                return _verdict(self._unhealthy() or self._unready())
            case "/metrics":
                return 200, CONTENT_TYPE, "".join(self._metrics())
        return _plain(404, "there are /health, /ready and /metrics")

    def _unhealthy(self) -> str:
        """Why this process is of no use any more, or nothing. Loading a model may take its time."""
        return self._worker.vitals().ending if self._worker else ""

    def _unready(self) -> str:
        if self._worker is None:
            return "the engine is starting"
        vitals = self._worker.vitals()
        state = vitals.infos[0].state
        if state != "serving":
            return state
        if vitals.silent > SILENT_SECONDS:
            return f"the engine was not seen alive for {vitals.silent:.0f} s"
        if not self._worker.counters.registered:
            return "Redis is away"
        return ""

    def _metrics(self) -> Iterator[str]:
        ready = self._worker is not None and not self._unhealthy() and not self._unready()
        yield from metric("ready", "gauge", "1 as long as /ready says 200.", ready)
        worker = self._worker
        if worker is None or self._depth is None:
            return
        counters, vitals = worker.counters, worker.vitals()
        info = vitals.infos[0]
        tokens = {
            "prompt": counters.prompt_tokens,
            "completion": counters.completion_tokens,
            "cached": counters.cached_tokens,
        }
        yield from metric(
            "worker_info",
            "gauge",
            "What this worker serves.",
            *((_named(one), 1) for one in vitals.infos),
        )
        yield from metric(
            "start_time_seconds", "gauge", "When it started, in Unix time.", info.started
        )
        yield from metric(
            "redis_up", "gauge", "Whether Redis took the last sign of life.", counters.registered
        )
        yield from metric("claimed_total", "counter", "Turns taken.", counters.claimed)
        yield from metric(
            "finished_total",
            "counter",
            "Turns that ended here, or went back to the queue (requeued).",
            *(({"outcome": outcome}, n) for outcome, n in counters.finished.items()),
        )
        yield from metric(
            "tokens_total",
            "counter",
            "Tokens of answered turns; cached ones are part of the prompt's.",
            *(({"kind": kind}, n) for kind, n in tokens.items()),
        )
        yield from metric("lease_renewals_total", "counter", "Leases renewed.", counters.renewed)
        yield from metric(
            "leases_lost_total",
            "counter",
            "Running turns that somebody else had taken over.",
            counters.lost,
        )
        yield from metric(
            "unstored_answers", "gauge", "Ended turns that wait for Redis.", vitals.unstored
        )
        yield from metric("slots", "gauge", "Turns that it takes at once.", info.slots)
        yield from metric(
            "running_turns",
            "gauge",
            "Turns that it holds.",
            sum(one.running for one in vitals.infos),
        )
        yield from metric(
            "engine_requests", "gauge", "Requests inside the engine.", vitals.in_engine
        )
        yield from metric(
            "engine_silent_seconds",
            "gauge",
            "Time since the engine was seen alive.",
            vitals.silent,
        )
        if depths := self._depth.latest():
            yield from metric(
                "queue_turns",
                "gauge",
                "Turns of this worker's model, and of its adapters', in the whole farm.",
                *(
                    ({"model": model, "state": state}, getattr(depth, state))
                    for model, depth in depths.items()
                    for state in ("queued", "running", "due", "suspects")
                ),
            )


class _DepthReader:
    """The depths of models' queues, read at most every DEPTH_SECONDS, in a thread that nobody waits for."""

    def __init__(self, farm: Farm, models: Sequence[str]) -> None:
        self._farm, self._models = farm, models
        self._depths: dict[str, Depth] | None = None
        self._started = -DEPTH_SECONDS
        self._reading = threading.Lock()
        self.latest()

    def latest(self) -> dict[str, Depth] | None:
        """As last read; None if they could not be read."""
        due = time.monotonic() - self._started >= DEPTH_SECONDS
        if due and self._reading.acquire(blocking=False):
            self._started = time.monotonic()
            threading.Thread(target=self._read, name="turnmill-depth", daemon=True).start()
        return self._depths

    def _read(self) -> None:
        try:
            self._depths = asyncio.run(self._ask())
        except (RedisError, OSError, TurnmillError) as error:
            log.debug("the depth of the queue cannot be read now: %s", error)
            self._depths = None
        finally:
            self._reading.release()

    async def _ask(self) -> dict[str, Depth]:
        async with asyncio.timeout(DEPTH_SECONDS), self._farm.connect() as redis:
            queue = Queue(redis, self._farm.keys)
            return {model: await queue.depth(model) for model in self._models}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], answer: Any) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.answer = answer
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # HTTPServer's own asks the name service for this host's name, which may take seconds.
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("answering %s", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = CLIENT_SECONDS
    server: _Server

    def do_GET(self) -> None:
        status, kind, text = self.server.answer(self.path.partition("?")[0])
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def version_string(self) -> str:
        return "turnmill"

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


def _parse(address: str) -> tuple[str, int]:
    """`PORT`, `HOST:PORT` or `[HOST]:PORT`."""
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise UsageError(f"--http {address}: must be PORT or HOST:PORT")
    return host.removeprefix("[").removesuffix("]") or DEFAULT_HOST, int(port)


def _named(info: WorkerInfo) -> dict[str, str]:
    identity = info.engine
    return {"model": info.model, "engine": identity.engine, "version": identity.version}


def _verdict(problem: str) -> Answer:
    return _plain(503, problem) if problem else _plain(200, "ok")


def _plain(status: int, text: str) -> Answer:
    return status, "text/plain; charset=utf-8", f"{text}\n"
