"""Connections to Redis: redis-py's asyncio ones, with three things mended."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.connection import HiredisRespSerializer
from redis.exceptions import ConnectionError

_serializer = HiredisRespSerializer()


class _Mended:
    def pack_command(self, *args: Any) -> list[bytes]:
        """By hiredis: in Python it takes ten times as long."""
        packed: list[bytes] = _serializer.pack(*args)
        return packed

    async def can_read_destructive(self) -> bool:
        """Asked before each use, whether a connection is still good: by what the loop knows of it. To wait for the
        loop to look, as redis-py does, holds a command back until all else that is ready has had its turn."""
        reader = self._reader  # type: ignore[attr-defined]
        if reader is None or reader.at_eof() or reader.exception():
            raise ConnectionError("the connection has ended")
        return False

    async def send_packed_command(
        self, command: bytes | str | Iterable[bytes], check_health: bool = True
    ) -> None:
        """uvloop refuses to write to a connection that has just ended with a RuntimeError, which would pass for a
        mistake in the program."""
        try:
            await super().send_packed_command(command, check_health)  # type: ignore[misc]
        except RuntimeError as error:
            await self.disconnect(nowait=True)  # type: ignore[attr-defined]
            raise ConnectionError(f"the connection has ended: {error}") from error


def mended(connection: type[AbstractConnection]) -> type[AbstractConnection]:
    """The same kind of connection, mended."""
    return type(connection.__name__, (_Mended, connection), {})
