"""One gateway on one port, by uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn

from turnmill.errors import UsageError
from turnmill.gateway.app import make_app
from turnmill.gateway.settings import GatewaySettings
from turnmill.open_files import allow_many_files
from turnmill.tasks import end_tasks

log = logging.getLogger("turnmill.gateway")

BACKLOG = 2048
LOOK_SECONDS = 0.01


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are for the command that serves."""
        yield


def bind(host: str, port: int, *, insecure: bool) -> socket.socket:
    """A socket that listens nowhere yet. Raises UsageError for an address that is none, or taken, or seen by others where
    nobody is asked for a key."""
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        if insecure and not ipaddress.ip_address(address[0]).is_loopback:
            raise UsageError(
                f"--insecure on {host}: others could ask without a key; leave one of the two out"
            )
        # With its protocol: asyncio turns Nagle's algorithm off only where it reads TCP. Else what follows the head of a
        # response waits for the client's delayed acknowledgement, 40 ms.
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise UsageError(f"cannot serve on {host} port {port}: {error.strerror or error}") from None
    return bound


@contextlib.asynccontextmanager
async def serving(
    settings: GatewaySettings, bound: socket.socket, *, drain: float
) -> AsyncIterator[asyncio.Task[None]]:
    """Serve inside the block, on a socket that is bound; yields once requests are taken. In the end, requests that are
    under way may go on for `drain` seconds. Yields the task that serves: it ends only if serving fails."""
    allow_many_files()  # each request that waits is one
    config = uvicorn.Config(
        make_app(settings),
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=max(1, round(drain)),
    )
    server = _Server(config)
    task = asyncio.get_running_loop().create_task(server.serve([bound]))
    try:
        while not server.started:
            if task.done():
                await task
                raise UsageError("the gateway did not start; its log says why")
            await asyncio.sleep(LOOK_SECONDS)
        yield task
    finally:
        server.should_exit = True
        await asyncio.wait({task}, timeout=drain + 5)
        await end_tasks([task])
        bound.close()


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
