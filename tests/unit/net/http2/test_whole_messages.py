"""Messages that one native call reads have the same effects as those read frame by frame, on either side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, strategies as st
from kvrouter.core import read_messages
from kvrouter.net.http2 import side as sides
from kvrouter.net.http2.frames import END_HEADERS, END_STREAM, PADDED, PREFACE, Kind, frame, settings, window_update
from kvrouter.net.http2.http2_call import Http2Call
from kvrouter.net.http2.received_call import Received, ReceivedCall
from kvrouter.net.http2.received_calls import ReceivedCalls
from kvrouter.net.http2.side import Flood, Http2Side, Http2Violation

from .http2_server import data, headers, opened, prefixed

_MESSAGES = st.lists(st.binary(max_size=400), max_size=4)
_FRAMES = st.one_of(
    _MESSAGES.map(lambda messages: data(b"".join(map(prefixed, messages)))),
    st.binary(max_size=20).map(data),
    st.sampled_from(
        [
            data(b""),
            data(prefixed(b"x"), stream=3),
            data(prefixed(b"y") + prefixed(b"z"), stream=3),
            data(prefixed(b"x"), stream=5),
            data(prefixed(b"x"), flags=END_STREAM),
            data(b"\0" + prefixed(b"x"), flags=PADDED),
            data(prefixed(b"x", compressed=1)),
            data(prefixed(bytes(9_000)) + prefixed(bytes(9_000))[:7_000]),
            data(prefixed(bytes(9_000))[7_000:]),
            window_update(0, 1),
            frame(Kind.RST_STREAM, bytes(4), stream=1),
        ]
    ),
)


def _client(received: list[bytes]) -> Http2Side:
    call = Http2Call("/a.B/C", "host:1", "http", max_message_bytes=100_000)
    call.on_messages = received.extend
    call.receive(opened())
    return call


def _starting_server(received: list[bytes]) -> Http2Side:
    return _server(lambda call: call.start(received.append, lambda: received.append(b"half-closed"), lambda: None))


def _leaving_server(received: list[bytes]) -> Http2Side:
    """Returns a server whose call ends with the first empty message."""

    def leave(call: ReceivedCall) -> None:
        def take(message: bytes) -> None:
            received.append(message)
            if not message:
                call.finish()

        call.start(take, lambda: None, lambda: None)

    return _server(leave)


def _reading_server(_received: list[bytes]) -> Http2Side:
    return _server(lambda _call: None)


def _server(begin: Callable[[ReceivedCall], None]) -> Http2Side:
    calls = ReceivedCalls(Received(), begin)
    blocks = [headers((":path", "/a.B/C"), flags=END_HEADERS, stream=stream) for stream in (1, 3)]
    calls.receive(PREFACE + settings({}) + b"".join(blocks) + data(prefixed(b"first")))
    return calls


def _effects(side: Any, received: list[bytes], chunks: Sequence[bytes]) -> tuple[object, ...]:
    violation = ""
    try:
        for chunk in chunks:
            side.receive(chunk)
    except Http2Violation as error:
        violation = str(error)
    calls = [
        (call._unallowed, call.restored, call._counted, list(call._messages), call._half_closed)
        for call in getattr(side, "calls", {}).values()
    ]
    return received, violation, side.flood._left, side._consumed, side._unread, calls, side.take()


@pytest.mark.parametrize("make", [_client, _starting_server, _reading_server])
@given(st.lists(_FRAMES, max_size=12), st.lists(st.integers(1, 3_000), min_size=1, max_size=4))
async def test_whole_messages_have_the_effects_of_their_frames(
    make: Callable[[list[bytes]], Http2Side], frames: list[bytes], sizes: list[int]
) -> None:
    sent, chunks = b"".join(frames), []
    while sent:
        size = sizes[len(chunks) % len(sizes)]
        chunks.append(sent[:size])
        sent = sent[size:]

    def effects() -> tuple[object, ...]:
        received: list[bytes] = []
        return _effects(make(received), received, chunks)

    at_once = effects()
    with patch.object(sides, "read_messages", lambda *_: (0, [], 0, 0, 0)):
        assert at_once == effects()


def _ended(side: Any) -> None:
    side.calls[1].finish()


def _begun(side: Any) -> None:
    side.receive(data(prefixed(bytes(1_000_000))[:10]))


@pytest.mark.parametrize("begin", [_ended, _begun])
async def test_messages_that_are_not_taken_are_parsed_natively_once(begin: Callable[[Any], None]) -> None:
    side, positions = _reading_server([]), []
    begin(side)

    def parsed(buffer: bytes, position: int, short_bytes: int) -> tuple[int, list[bytes], int, int, int]:
        positions.append(position)
        return read_messages(buffer, position, short_bytes)

    with patch.object(sides, "read_messages", parsed):
        side.receive(data(prefixed(bytes(260))) * 100)
    assert positions == [0]


@pytest.mark.parametrize("is_native", [True, False])
async def test_data_after_the_end_of_their_call_are_a_flood(is_native: bool) -> None:
    side = _leaving_server([])
    native = read_messages if is_native else lambda *_: (0, [], 0, 0, 0)
    with patch.object(sides, "read_messages", native), pytest.raises(Flood):
        side.receive(data(prefixed(b"")) + data(prefixed(b"x")) * 2_000)
