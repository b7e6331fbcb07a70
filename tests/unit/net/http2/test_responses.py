"""Responses take their turns on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import hpack
import pytest
from kvrouter.net.budgets import PASS_US, loop_budget
from kvrouter.net.http2.frames import END_HEADERS, LEAST_MAX_FRAME_BYTES, Kind, frame
from kvrouter.net.http2.http2_call import Http2Call
from kvrouter.net.http2.responses import ResponseConnection, Responses
from kvrouter.net.http2.side import prefix


@asynccontextmanager
async def passes() -> AsyncIterator[list[None]]:
    """Others that need a whole pass each time; grows with each of theirs."""
    theirs: list[None] = []

    async def compete() -> None:
        while True:
            theirs.append(await loop_budget().turn(PASS_US))

    competing = asyncio.create_task(compete())
    try:
        yield theirs
    finally:
        competing.cancel()


@pytest.mark.parametrize(
    ("size", "count", "fewest", "most"), [(1 << 20, 1, 0, 20), (1, 5000, 30, 5000)], ids=["long", "many"]
)
async def test_responses_take_turns_as_their_work_needs(size: int, count: int, fewest: int, most: int) -> None:
    connection = ResponseConnection(Http2Call("/a/b", "localhost:1", "http", max_message_bytes=size))
    responses = Responses(connection, b"")
    data = (prefix(size) + bytes(size)) * count
    received = frame(Kind.HEADERS, hpack.Encoder().encode([(":status", "200")]), flags=END_HEADERS, stream=1)
    for at in range(0, len(data), LEAST_MAX_FRAME_BYTES):
        received += frame(Kind.DATA, data[at : at + LEAST_MAX_FRAME_BYTES], stream=1)
    async with passes() as theirs:
        connection.data_received(received)
        assert [await responses.read() for _ in range(count)] == [bytes(size)] * count
        assert fewest <= len(theirs) <= most
