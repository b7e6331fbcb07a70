"""Calls of a server's streams, without a transport."""

from __future__ import annotations

import asyncio
import gc
import warnings

from kvrouter.net.calls.server import CallStreamServer
from kvrouter.net.calls.server_call import ServerCall

from .linked import Linked


async def test_a_call_that_is_cancelled_as_it_arrives_ends_its_handler() -> None:
    events: list[str] = []

    async def answer() -> bytes:
        events.append("began")
        try:
            await asyncio.Event().wait()
        finally:
            events.append("ended")
        return b""

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        call = ServerCall(Linked().server, 1, None, "")
        CallStreamServer()._run(call, answer())
        call.abandon()
        for _ in range(5):  # turns of the event loop: it begins, is cancelled, and ends
            await asyncio.sleep(0)
        gc.collect()
    assert events == ["began", "ended"]
    assert not warned
