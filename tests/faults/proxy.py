"""Between clients and a Redis server: a forwarder whose server can be switched, and one that loses answers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter, deque
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, Self

from turnmill.scripts import Script

CHUNK = 1 << 16


class Forwarder:
    """Listens on 127.0.0.1 for clients of the server on the socket `server`, in a thread of its own."""

    def __init__(self, server: Path | None) -> None:
        self._server = server
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._listener = self._call(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = int(self._listener.sockets[0].getsockname()[1])
        self.url = f"redis://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._listener.close)
        self.switch(None)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def switch(self, server: Path | None) -> None:
        """Every connection ends. Those to come are with this server; with None they end at once."""

        async def hang_up() -> None:
            self._server = server
            connections = list(self._connections)
            for connection in connections:
                connection.cancel()
            await asyncio.gather(*connections, return_exceptions=True)

        self._call(hang_up())

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                if self._server is not None:
                    await self._connect(self._server, reader, writer)
        finally:
            writer.transport.abort()
            self._connections.discard(task)

    async def _connect(
        self, server: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Until either side, or this one, ends the connection."""
        from_server, to_server = await asyncio.open_unix_connection(str(server))
        ways = [
            asyncio.ensure_future(way) for way in self._ways(reader, writer, from_server, to_server)
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            to_server.transport.abort()
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    def _ways(
        self,
        from_client: asyncio.StreamReader,
        to_client: asyncio.StreamWriter,
        from_server: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
    ) -> tuple[Coroutine[Any, Any, None], Coroutine[Any, Any, None]]:
        """Forth and back; the connection ends with the first of them."""
        return _carry(from_client, to_server), _carry(from_server, to_client)


class LossyProxy(Forwarder):
    """Ends connections exactly between a script's effect and its answer.

    `lost`: how many answers it has lost.
    """

    def __init__(self, server: Path) -> None:
        self.lost = 0
        self._losing: Counter[bytes] = Counter()
        super().__init__(server)

    def lose(self, script: Script, times: int = 1) -> None:
        """The next so many times that the server has run this script, the connection ends instead of the
        answer. What was answered before on that connection arrives."""
        self._losing[script.sha.encode()] = times

    def _ways(
        self,
        from_client: asyncio.StreamReader,
        to_client: asyncio.StreamWriter,
        from_server: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
    ) -> tuple[Coroutine[Any, Any, None], Coroutine[Any, Any, None]]:
        # Every command has one answer, and answers come in the order of the commands.
        asked: deque[bytes] = deque()
        return self._ask(from_client, to_server, asked), self._answer(from_server, to_client, asked)

    async def _ask(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: deque[bytes]
    ) -> None:
        frames = _Frames()
        while data := await reader.read(CHUNK):
            asked.extend(frames.feed(data))
            writer.write(data)
            await writer.drain()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: deque[bytes]
    ) -> None:
        frames = _Frames()
        while data := await reader.read(CHUNK):
            for answer in frames.feed(data):
                if self._is_lost(asked.popleft(), answer):
                    return
                writer.write(answer)
            await writer.drain()

    def _is_lost(self, command: bytes, answer: bytes) -> bool:
        if answer.startswith(b"-"):
            return False  # the script has had no effect
        for sha, times in self._losing.items():
            if times and sha in command and b"evalsha" in command[:32].lower():
                self._losing[sha] -= 1
                self.lost += 1
                return True
        return False


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()


class _Frames:
    """Cuts a stream of bytes into commands, or into answers."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._data += data
        while end := frame_end(self._data):
            yield bytes(self._data[:end])
            del self._data[:end]


def frame_end(data: bytes | bytearray) -> int:
    """Where the first command or answer (RESP2) in `data` ends; 0 if it is not all there."""
    wanted, at = 1, 0
    while wanted:
        line_end = data.find(b"\r\n", at)
        if line_end < 0:
            return 0
        kind, rest = data[at : at + 1], data[at + 1 : line_end]
        at = line_end + 2
        wanted -= 1
        if kind == b"*":
            wanted += max(0, int(rest))
        elif kind == b"$" and int(rest) >= 0:
            at += int(rest) + 2
        if at > len(data):
            return 0
    return at
