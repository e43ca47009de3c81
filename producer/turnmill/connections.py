"""Connections to Redis: redis-py's asyncio ones, with two things mended."""

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
