"""One gRPC call on an HTTP/2 connection, without I/O."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import grpc
import pytest
from hypothesis import given, strategies as st
from kvrouter.net.http2.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    INITIAL_WINDOW_BYTES,
    PADDED,
    PRIORITY,
    Kind,
    Setting,
    frame,
    frame_header,
    settings,
    window_update,
)
from kvrouter.net.http2.http2_call import Http2Call
from kvrouter.net.http2.side import Flood, Http2Violation, MessageTooLong

from .http2_server import data, ended, headers, opened, prefixed, read

LIMIT = 100_000
KEPT = grpc.StatusCode


def call(**options: Any) -> tuple[Http2Call, list[bytes]]:
    received: list[bytes] = []
    made = Http2Call("/a.B/C", "host:1", "http", max_message_bytes=LIMIT, **options)
    made.on_messages = received.extend
    return made, received


def receive_all(made: Http2Call, chunks: Iterable[bytes]) -> None:
    for chunk in chunks:
        made.receive(chunk)
        made.take()


def test_a_call_begins_with_its_path_and_metadata() -> None:
    made, _ = call(metadata=(("x-token", "secret"), ("x-long", "é" * 200)))
    sent = read(made.take())
    assert sent.headers == {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": b"/a.B/C",
        b":authority": b"host:1",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
        b"user-agent": b"kvrouter",
        b"x-token": b"secret",
        b"x-long": "é".encode() * 200,
    }
    assert sent.kinds() == [Kind.SETTINGS, Kind.WINDOW_UPDATE]
    assert made.take() == b""


@given(
    st.lists(st.binary(max_size=40_000), max_size=6),
    st.lists(st.integers(min_value=1, max_value=30_000), min_size=1, max_size=20),
    st.integers(min_value=1, max_value=16_384),
)
def test_messages_arrive_whole_however_they_are_cut(messages: list[bytes], chunks: list[int], payload: int) -> None:
    made, received = call()
    stream = b"".join(map(prefixed, messages))
    # More frames without a message, or reads without a frame, would be a flood.
    payload = max(payload, len(stream) // 400)
    sent = opened() + b"".join(data(stream[start : start + payload]) for start in range(0, len(stream), payload))
    sent += ended("0")
    position = 0
    while position < len(sent):
        size = max(chunks[position % len(chunks)], len(sent) // 400)
        made.receive(sent[position : position + size])
        position += size
    assert received == messages
    assert made.ended == (KEPT.OK, "")


@given(
    st.lists(st.binary(max_size=60_000), max_size=5),
    st.lists(st.tuples(st.integers(0, 1), st.integers(1, 90_000)), max_size=60),
    st.integers(min_value=0, max_value=100_000),
)
def test_a_client_sends_what_the_windows_of_the_server_allow(
    messages: list[bytes], updates: list[tuple[int, int]], initial: int
) -> None:
    """The windows of connection and stream grow one by one. In the end they are large enough."""
    made, _ = call()
    made.receive(settings({Setting.INITIAL_WINDOW_SIZE: initial}))
    written, waiting = bytearray(), list(messages)
    windows = [INITIAL_WINDOW_BYTES, initial]

    def write() -> None:
        while True:
            if waiting and not made.blocked:
                made.send(waiting.pop(0))
            chunk = made.take()
            if not chunk:
                return
            written.extend(chunk)

    write()
    for stream, more in [*updates, (0, 1 << 20), (1, 1 << 20)]:
        sent = read(bytes(written))
        amount = sum(len(each) + 5 for each in sent.messages) + len(sent.rest)
        assert amount <= min(windows)
        made.receive(window_update(stream, more))
        windows[stream] += more
        write()
    assert read(bytes(written)).messages == messages
    assert not made.blocked


def test_a_smaller_window_holds_back_what_a_larger_one_allowed() -> None:
    made, _ = call()
    made.send(bytes(60_000))
    made.take()
    made.receive(settings({Setting.INITIAL_WINDOW_SIZE: 10}))
    made.take()
    made.send(b"x")
    assert made.take() == b""
    assert made.blocked
    made.receive(window_update(1, 60_000))
    assert not made.take().endswith(b"x")
    made.receive(window_update(1, 1))
    assert made.take().endswith(b"x")


def test_a_server_may_send_on_when_half_of_its_window_is_read() -> None:
    made, received = call()
    made.take()
    made.receive(opened())
    made.take()
    updates = b""
    for _ in range(400):
        made.receive(data(prefixed(bytes(12_000))))
        updates += made.take()
    assert len(received) == 400
    updated = [int.from_bytes(updates[at + 9 : at + 13], "big") for at in range(0, len(updates), 13)]
    assert len(updated) >= 2
    assert updated[::2] == updated[1::2]  # Of the connection, and of the stream.


def test_padding_and_priorities_are_skipped() -> None:
    made, received = call()
    block = headers((":status", "200"))[9:]
    padded = bytes([3]) + bytes(5) + block + bytes(3)
    made.receive(settings({}) + frame(Kind.HEADERS, padded, flags=END_HEADERS | PADDED | PRIORITY, stream=1))
    made.receive(data(bytes([4]) + prefixed(b"hi") + bytes(4), flags=PADDED))
    made.receive(frame(Kind.PRIORITY, bytes(5), stream=1) + frame_header(3, 0x77, 0, 9) + b"new")
    assert received == [b"hi"]


def test_a_header_block_may_be_continued() -> None:
    made, _ = call()
    block = headers((":status", "200"))[9:]
    made.receive(frame(Kind.HEADERS, block[:1], stream=1))
    made.receive(frame(Kind.CONTINUATION, block[1:], flags=END_HEADERS, stream=1) + ended("0"))
    assert made.ended == (KEPT.OK, "")


def test_pings_and_settings_are_answered() -> None:
    made, _ = call()
    made.take()
    made.receive(settings({}) + frame(Kind.PING, b"12345678"))
    assert made.take() == frame(Kind.SETTINGS, flags=ACK) + frame(Kind.PING, b"12345678", flags=ACK)
    made.receive(frame(Kind.SETTINGS, flags=ACK) + frame(Kind.PING, b"12345678", flags=ACK))
    assert made.take() == b""


ENDS = {
    "a status": (opened() + ended("14", "gone%20away%0A%C3%A4"), KEPT.UNAVAILABLE, "gone away\nä"),
    "a status alone": (
        headers((":status", "200"), ("grpc-status", "16"), flags=END_HEADERS | END_STREAM),
        KEPT.UNAUTHENTICATED,
        "",
    ),
    "an unknown status": (opened() + ended("99"), KEPT.UNKNOWN, ""),
    "a status that is no number": (opened() + ended("-1"), KEPT.UNKNOWN, ""),
    "a status of 5,000 digits": (opened() + ended("1" * 5_000), KEPT.UNKNOWN, ""),
    "a message that is not text": (opened() + ended("13", "%ff%"), KEPT.INTERNAL, "\ufffd%"),
    "a page of 5,000 digits": (headers((":status", "9" * 5_000)), KEPT.UNKNOWN, "received 999"),
    "no status": (opened() + data(b"", flags=END_STREAM), KEPT.UNKNOWN, "without a status"),
    "a page": (headers((":status", "503"), flags=END_HEADERS), KEPT.UNAVAILABLE, "received 503"),
    "a reset": (opened() + frame(Kind.RST_STREAM, (8).to_bytes(4, "big"), stream=1), KEPT.CANCELLED, "error 8"),
    "a refusal of all calls": (
        frame(Kind.GOAWAY, bytes(4) + (11).to_bytes(4, "big") + b"calm down"),
        KEPT.UNAVAILABLE,
        "calm down",
    ),
}


@pytest.mark.parametrize(("sent", "code", "details"), ENDS.values(), ids=ENDS)
def test_a_server_ends_a_call(sent: bytes, code: grpc.StatusCode, details: str) -> None:
    made, received = call()
    made.receive(sent + opened() * 3)
    assert made.ended is not None
    assert made.ended[0] == code
    assert details in made.ended[1]
    assert not received


def test_a_server_that_stops_lets_the_call_run() -> None:
    made, received = call()
    made.receive(opened() + frame(Kind.GOAWAY, (1).to_bytes(4, "big") + bytes(4)) + data(prefixed(b"on")))
    assert received == [b"on"]
    assert made.ended is None
    assert made.going_away


REFUSALS = {
    "all calls are refused": frame(Kind.GOAWAY, bytes(8)),
    "the stream is refused": frame(Kind.RST_STREAM, (7).to_bytes(4, "big"), stream=1),
}


@pytest.mark.parametrize("sent", REFUSALS.values(), ids=REFUSALS)
def test_a_refused_call_was_never_processed_unless_the_server_has_answered(sent: bytes) -> None:
    made, _ = call()
    made.receive(settings({}) + sent)
    assert made.ended is not None
    assert made.never_processed
    answered, _ = call()
    answered.receive(opened() + sent)
    assert answered.ended is not None
    assert not answered.never_processed


FLOODS = {
    "pings": frame(Kind.PING, bytes(8)),
    "answers to pings": frame(Kind.PING, bytes(8), flags=ACK),
    "settings": settings({Setting.INITIAL_WINDOW_SIZE: 1 << 20}),
    "acknowledged settings": frame(Kind.SETTINGS, flags=ACK),
    "empty data": data(b""),
    "padded data": data(b"\xff" + bytes(255), flags=PADDED),
    "data byte by byte": data(b"\0"),
    "priorities": frame(Kind.PRIORITY, bytes(5), stream=1),
    "resets of other streams": frame(Kind.RST_STREAM, bytes(4), stream=3),
    "window updates": window_update(0, 1),
    "window updates of other streams": window_update(9, 1),
    "goodbyes": frame(Kind.GOAWAY, (1).to_bytes(4, "big") + bytes(4)),
    "unknown frames": frame_header(0, 0x77, 0, 0),
    "long unknown frames": frame_header(16_384, 0x77, 0, 0) + bytes(16_384),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_server_that_sends_frames_without_progress_is_refused(flood: bytes, at_once: bool) -> None:
    made, _ = call()
    made.receive(opened())
    with pytest.raises(Flood):
        receive_all(made, [flood * 2_000] if at_once else [flood] * 2_000)


def test_informational_headers_without_end_are_refused() -> None:
    made, _ = call()
    with pytest.raises(Flood):
        receive_all(made, [headers((":status", "103"), ("x-a", "a" * 100))] * 1_000)


def test_a_header_block_of_empty_continuations_is_refused() -> None:
    made, _ = call()
    with pytest.raises(Flood):
        made.receive(frame(Kind.HEADERS, stream=1) + frame(Kind.CONTINUATION, stream=1) * 1_100)


def test_bytes_one_by_one_are_refused() -> None:
    made, _ = call()
    made.receive(opened())
    sent = data(prefixed(bytes(2_000)))
    with pytest.raises(Flood):
        receive_all(made, (sent[position : position + 1] for position in range(len(sent))))


def test_an_honest_server_is_not_taken_for_a_flood() -> None:
    """It answers each part of a message with window updates and a ping, and pings with every message."""
    made, received = call()
    made.receive(opened() + window_update(0, 1 << 30) + window_update(1, 1 << 30))
    answer = window_update(0, 1) + window_update(1, 1) + frame(Kind.PING, bytes(8))
    for _ in range(2_000):
        made.send(bytes(20_000))
        made.take()
        made.receive(answer)
        made.receive(data(prefixed(b"token")))
        made.receive(data(prefixed(b"a") + prefixed(b"b")[:3]))
        made.receive(data(prefixed(b"b")[3:]))
    assert len(received) == 6_000


VIOLATIONS = {
    "bytes of another protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "a frame that is too long": frame_header(16_385, Kind.DATA, 0, 1),
    "data before headers": data(prefixed(b"x")),
    "data on another stream": opened() + data(prefixed(b"x"), stream=3),
    "headers on another stream": headers((":status", "200"), stream=3),
    "headers that cannot be decoded": frame(Kind.HEADERS, b"\xff" * 40, flags=END_HEADERS, stream=1),
    "headers without end": frame(Kind.HEADERS, stream=1) + frame(Kind.CONTINUATION, bytes(16_000), stream=1) * 5,
    "headers that are interrupted": frame(Kind.HEADERS, stream=1) + frame(Kind.PING, bytes(8)),
    "headers that begin with more than is accepted": headers((":status", "200"), ("x", "~" * 16_380)),
    "further headers that do not end the call": opened() + headers(("grpc-status", "0")),
    "a last header block that is informational": headers((":status", "103"), flags=END_HEADERS | END_STREAM)[:9]
    + b"\x48\x03103",
    "a continuation of nothing": frame(Kind.CONTINUATION, b"", stream=1),
    "more padding than data": opened() + data(b"\xff123", flags=PADDED),
    "padding without data": opened() + data(b"", flags=PADDED),
    "a compressed message": opened() + data(prefixed(b"x", compressed=1)),
    "a reset of 16,384 bytes": opened() + frame(Kind.RST_STREAM, b"\xff" * 16_384, stream=1),
    "a reset of the connection": opened() + frame(Kind.RST_STREAM, bytes(4)),
    "a ping of nine bytes": frame(Kind.PING, bytes(9)),
    "a ping on a stream": frame(Kind.PING, bytes(8), stream=1),
    "settings of a stream": frame(Kind.SETTINGS, stream=1),
    "an end of the connection that is cut off": frame(Kind.GOAWAY, bytes(4)),
    "frames that are too large": settings({Setting.MAX_FRAME_SIZE: 1 << 24}),
    "settings that make a window too large": window_update(1, (1 << 31) - 1 - INITIAL_WINDOW_BYTES)
    + settings({Setting.INITIAL_WINDOW_SIZE: INITIAL_WINDOW_BYTES + 1}),
    "settings that are cut off": frame(Kind.SETTINGS, b"12345"),
    "a window that is too large": settings({Setting.INITIAL_WINDOW_SIZE: 1 << 31}),
    "frames that are too small": settings({Setting.MAX_FRAME_SIZE: 1}),
    "a window update of nothing": window_update(0, 0),
    "a window update of too much": window_update(1, (1 << 31) - 1),
    "a window update that is cut off": frame(Kind.WINDOW_UPDATE, b"1"),
    "a push": frame(Kind.PUSH_PROMISE, bytes(4), stream=1),
}


@pytest.mark.parametrize("sent", VIOLATIONS.values(), ids=VIOLATIONS)
def test_a_server_that_breaks_a_rule_is_refused(sent: bytes) -> None:
    made, _ = call()
    with pytest.raises(Http2Violation):
        made.receive(sent)


def test_a_message_that_is_too_long_is_refused_at_its_beginning() -> None:
    made, _ = call()
    with pytest.raises(MessageTooLong):
        made.receive(opened() + data(prefixed(bytes(LIMIT + 1))[:10]))


@given(st.binary(max_size=200), st.integers(0, 11), st.integers(0, 255), st.integers(0, 3))
def test_garbage_is_refused_or_ignored(payload: bytes, kind: int, flags: int, stream: int) -> None:
    made, _ = call()
    made.receive(opened())
    with suppress(Http2Violation):
        made.receive(frame_header(len(payload), kind, flags, stream) + payload + payload)


def test_a_client_cancels_its_call() -> None:
    made, _ = call()
    made.send(bytes(200_000))
    begun = made.take()
    made.cancel()
    sent = read(begun + made.take())
    assert sent.kinds()[-2:] == [Kind.RST_STREAM, Kind.GOAWAY]
    assert not made.blocked


def test_metadata_that_fits_no_frame_is_refused() -> None:
    with pytest.raises(ValueError, match="metadata"):
        call(metadata=(("x-token", "~" * 20_000),))
