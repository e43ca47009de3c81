"""Commands as bytes, by hiredis: redis-py's asyncio connections make them in Python, which takes ten times as long."""

from __future__ import annotations

from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.connection import HiredisRespSerializer

_serializer = HiredisRespSerializer()


class _Packing:
    def pack_command(self, *args: Any) -> list[bytes]:
        packed: list[bytes] = _serializer.pack(*args)
        return packed


def packing(connection: type[AbstractConnection]) -> type[AbstractConnection]:
    """The same kind of connection, whose commands are packed by hiredis."""
    return type(connection.__name__, (_Packing, connection), {})
