"""A connection of a server whose input waits for its turn, over loopback, on both event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from kvrouter.net.budgets import PASS_US, loop_budget
from kvrouter.net.http2.frames import PREFACE, Kind, frame, settings
from kvrouter.net.http2.received_call import Received
from kvrouter.net.http2.server_connection import ServerConnection

from ....waiting import until

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_connection_that_is_lost_while_its_input_waits_ends_and_holds_up_nobody(run: Run) -> None:
    reports: list[dict[str, Any]] = []
    made: list[ServerConnection] = []
    closed: list[ServerConnection] = []

    def connection() -> ServerConnection:
        made.append(ServerConnection(lambda _: None, closed.append, Received(), lambda _: None))
        return made[-1]

    async def main() -> None:
        loop, budget = asyncio.get_running_loop(), loop_budget()
        loop.set_exception_handler(lambda _, report: reports.append(report))
        server = await loop.create_server(connection, "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(PREFACE + settings({}))
        await until(lambda: made and made[0].calls.has_begun)
        (lost,) = made
        # The work of others takes the whole pass, and the next one.
        budget.call(PASS_US, lambda: None)
        budget.call(PASS_US, lambda: None)
        lost.data_received(frame(Kind.PING, b"12345678"))
        done: list[None] = []
        budget.call(PASS_US, lambda: done.append(None))
        assert lost._unread
        assert lost._transport is not None
        lost._transport.abort()
        await until(lambda: closed and done)
        assert closed == [lost]
        assert not lost._unread
        budget.call(PASS_US, lambda: done.append(None))
        await until(lambda: len(done) == 2)
        writer.close()
        server.close()

    run(main())
    assert not reports
