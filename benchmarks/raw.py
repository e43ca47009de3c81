"""What the server alone could do: the very commands that the scripts run for a turn, without scripts and workers.

MONITOR records what the scripts of a worker run; a client that only sends, pipelined, and counts nothing
sends the same to a server with the same queue, as redis-benchmark would.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from ast import literal_eval
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import redis

from benchmarks.contenders import Contender
from benchmarks.farm import server, socket_path, wait_for
from turnmill.embedded import EmbeddedServer

_FROM_A_SCRIPT = re.compile(rb"\+[0-9.]+ \[[0-9]+ lua\] (.*)\Z")
_ARGUMENT = re.compile(rb'"(?:[^"\\]|\\.)*"')
_END = b"the-end-of-it"


def record(contender: Contender, filled: Path) -> list[bytes]:
    """The commands that scripts run while one worker empties the queue, as they are sent to a server."""
    with server(filled) as on, redis.Redis.from_url(on.url) as client, ExitStack() as stack:
        monitor = stack.enter_context(_connect(on))
        monitor.sendall(b"MONITOR\r\n")
        worker = contender.work(on, stack)
        wait_for(lambda: contender.ended(client) >= contender.turns, worker, pause=0.1)
        client.echo(_END.decode())
        lines = _read_until(monitor, b'"ECHO" "%s"\r\n' % _END).split(b"\r\n")
    found = (_FROM_A_SCRIPT.match(line) for line in lines)
    return [_packed(_ARGUMENT.findall(match[1])) for match in found if match]


def replay(commands: list[bytes], filled: Path) -> float:
    """Seconds that the server takes for the commands, sent as fast as it takes them."""
    everything = b"".join(commands) + _packed([b'"ECHO"', b'"%s"' % _END])
    with server(filled) as on, _connect(on) as connection:
        sender = threading.Thread(target=connection.sendall, args=(everything,))
        started = time.perf_counter()
        sender.start()
        _read_until(connection, b"%s\r\n" % _END)
        took = time.perf_counter() - started
        sender.join()
    return took


def _connect(on: EmbeddedServer) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(socket_path(on))
    return connection


def _read_until(connection: socket.socket, end: bytes) -> bytes:
    """What is received up to `end`, and a little more: a worker that has nothing to do goes on talking."""
    received, seen = bytearray(), 0
    while received.find(end, max(0, seen - len(end))) < 0:
        seen = len(received)
        data = connection.recv(1 << 20)
        if not data:
            raise ConnectionError("the server closed the connection")
        received += data
    return bytes(received)


def _packed(quoted: list[Any]) -> bytes:
    """A command as RESP. MONITOR quotes each argument as Python would a bytes literal."""
    arguments = [literal_eval(f"b{argument.decode()}") for argument in quoted]
    parts = [b"$%d\r\n%s\r\n" % (len(argument), argument) for argument in arguments]
    return b"*%d\r\n%s" % (len(parts), b"".join(parts))
