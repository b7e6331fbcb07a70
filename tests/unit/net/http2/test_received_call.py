"""What the handler of a call reads and answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kvrouter.net.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADER_BYTES,
    PREFACE,
    Setting,
    read_frame_header,
    settings,
    window_update,
)
from kvrouter.net.http2.received_call import Received, ReceivedCall
from kvrouter.net.http2.received_calls import ReceivedCalls

from .http2_server import data, headers, prefixed


def _opened(window: int) -> tuple[ReceivedCalls, ReceivedCall]:
    begun: list[ReceivedCall] = []
    calls = ReceivedCalls(Received(), begun.append)
    block = headers((":path", "/a.B/C"), flags=END_HEADERS)
    calls.receive(PREFACE + settings({Setting.INITIAL_WINDOW_SIZE: window}) + block)
    return calls, begun[0]


def _payloads(written: bytes) -> bytes:
    found, position = b"", 0
    while position < len(written):
        length, kind, _, _ = read_frame_header(written, position)
        start = position + HEADER_BYTES
        position = start + length
        found += written[start:position] if kind == DATA else b""
    return found


async def test_answers_that_wait_for_room_are_sent_before_the_end() -> None:
    calls, call = _opened(window=0)

    async def serve() -> None:
        await call.answer(lambda message: message)
        assert not await _is_any_left(call)
        call.finish()

    serving = asyncio.create_task(serve())
    await asyncio.sleep(0)
    calls.receive(data(prefixed(b"one")) + data(b"", flags=END_STREAM))
    await asyncio.sleep(0.01)
    written = calls.take()
    assert not serving.done()
    calls.receive(window_update(1, 1_000))
    await serving
    assert _payloads(written + calls.take()) == prefixed(b"one")


async def _is_any_left(call: Any) -> bool:
    return isinstance(await call.read(), bytes)


async def test_a_call_has_one_reader() -> None:
    _, call = _opened(window=1_000)
    reading = asyncio.create_task(call.read())
    await asyncio.sleep(0)
    with pytest.raises(AssertionError):
        await call.answer(lambda message: message)
    with pytest.raises(AssertionError):
        await call.read()
    reading.cancel()
