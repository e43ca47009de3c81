"""Connections to Redis: redis-py's asyncio ones, with some things mended."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Iterable
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.connection import HiredisRespSerializer
from redis.exceptions import ConnectionError, TimeoutError

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
        """redis-py bounds its wait by `asyncio.wait_for`, which loses a cancellation that comes as the write ends (Python
        3.11): who was told to end goes on for ever. And uvloop refuses to write to a connection that has just ended
        with a RuntimeError, which would pass for a mistake in the program."""
        me: Any = self
        if not me.is_connected:
            await me.connect()
        elif check_health:
            await me.check_health()
        if isinstance(command, str):
            command = command.encode()
        try:
            async with asyncio.timeout(me.socket_timeout):
                me._writer.writelines([command] if isinstance(command, bytes) else command)
                await me._writer.drain()
        except builtins.TimeoutError:
            await me.disconnect(nowait=True)
            raise TimeoutError("Timeout writing to socket") from None
        except (OSError, RuntimeError) as error:
            await me.disconnect(nowait=True)
            raise ConnectionError(f"the connection has ended: {error}") from error
        except BaseException:  # half a command may be on its way
            await me.disconnect(nowait=True)
            raise


def mended(connection: type[AbstractConnection]) -> type[AbstractConnection]:
    """The same kind of connection, mended."""
    return type(connection.__name__, (_Mended, connection), {})
