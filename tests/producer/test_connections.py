"""Connections that end under our hands."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import pytest
import redis.exceptions
import uvloop
from tests.processes import ValkeyServer, until_async

from turnmill.settings import Farm


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_writing_to_a_connection_that_has_just_ended_is_a_connection_error(
    valkey: ValkeyServer, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def write() -> None:
        connection = Farm(valkey.url).pool(connections=1).make_connection()
        await connection.connect()
        connection._writer.transport.abort()  # as when the server's end arrives between two writes
        await asyncio.sleep(0)
        with pytest.raises(redis.exceptions.ConnectionError):
            await connection.send_command("PING", check_health=False)
        await connection.disconnect(nowait=True)

    with contextlib.closing(new_loop()) as loop:
        loop.run_until_complete(write())


async def test_a_connection_that_ended_while_nobody_used_it_is_made_anew(
    valkey: ValkeyServer,
) -> None:
    async with Farm(valkey.url).connect() as client, Farm(valkey.url).connect() as other:
        mine = await client.client_id()
        assert await other.client_kill_filter(_id=mine) == 1

        async def seen() -> bool:
            (connection,) = client.connection_pool._available_connections
            return bool(connection._reader.at_eof())

        await until_async(seen)
        assert await client.ping()
        assert await client.client_id() != mine


async def test_who_is_told_to_end_while_it_connects_ends(valkey: ValkeyServer) -> None:
    for steps in range(8):  # wherever it is by then
        async with Farm(valkey.url).connect() as client:
            task = asyncio.create_task(client.ping())
            for _ in range(steps):
                await asyncio.sleep(0)
            if task.done():
                break
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
