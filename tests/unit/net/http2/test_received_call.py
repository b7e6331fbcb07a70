"""What the handler of a call reads and answers."""

from __future__ import annotations

import asyncio

import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyResponse,
    CommonResponse,
    HttpBody,
    ProcessingRequest,
    ProcessingResponse,
)
from kvrouter.core import PassedStream
from kvrouter.net.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADER_BYTES,
    MAX_31_BITS,
    PREFACE,
    Kind,
    Setting,
    frame,
    read_frame_header,
    settings,
    window_update,
)
from kvrouter.net.http2.received_call import WINDOW_BYTES, Received, ReceivedCall
from kvrouter.net.http2.received_calls import ReceivedCalls
from kvrouter.net.http2.side import Flood

from .http2_server import data, headers, prefixed


def _opened(window: int, *, is_answered: bool = True) -> tuple[ReceivedCalls, ReceivedCall]:
    begun: list[ReceivedCall] = []
    calls = ReceivedCalls(Received(), begun.append)
    block = headers((":path", "/a.B/C"), flags=END_HEADERS)
    calls.receive(PREFACE + settings({Setting.INITIAL_WINDOW_SIZE: window}) + block)
    if is_answered:
        begun[0]._begin()
    return calls, begun[0]


def _payloads(written: bytes) -> bytes:
    found, position = b"", 0
    while position < len(written):
        length, kind, _, _ = read_frame_header(written, position)
        start = position + HEADER_BYTES
        position = start + length
        found += written[start:position] if kind == DATA else b""
    return found


def _piece(body: bytes) -> bytes:
    return prefixed(ProcessingRequest(response_body=HttpBody(body=body)).SerializeToString())


_PIECE = _piece(b"data: 1\n\n")
_ANSWER = prefixed(ProcessingResponse(response_body=BodyResponse(response=CommonResponse())).SerializeToString())


class _Reader:
    """Reads a call whose pieces are answered before it."""

    def __init__(self, calls: ReceivedCalls, call: ReceivedCall, limit: int = 0) -> None:
        self.calls = calls
        self.call = call
        self.counted: list[tuple[int, bytes]] = []
        self._limit = limit
        self._stream = PassedStream(sends_back=False)
        call.answer_pieces(self._stream, self._count)
        self.reading = asyncio.create_task(call.read())

    def _count(self) -> None:
        self.counted.append(self._stream.taken())
        self._stream.limit = self._limit

    async def receive(self, *frames: bytes) -> bytes:
        await asyncio.sleep(0)
        self.calls.receive(b"".join(frames))
        await asyncio.sleep(0)
        return _payloads(self.calls.take())


async def test_pieces_are_answered_while_the_handler_waits_for_other_messages() -> None:
    reader = _Reader(*_opened(window=1_000), limit=1)
    assert await reader.receive(data(_PIECE)) == _ANSWER
    assert await reader.receive(data(_PIECE), data(_PIECE), data(_PIECE)) == _ANSWER * 3
    assert reader.counted == [(1, b"data: 1\n\n"), (2, b"data: 1\n\n" * 2)], "each time its limit is passed"
    assert await reader.receive(data(prefixed(b"other")), data(_PIECE)) == b""
    assert await reader.reading == b"other"
    assert await reader.call.read() == _PIECE[5:], "what follows another message is not answered before it"
    reader.reading = asyncio.create_task(reader.call.read())
    assert await reader.receive(data(_PIECE)) == _ANSWER
    assert await reader.receive(data(b"", flags=END_STREAM)) == b""
    assert not isinstance(await reader.reading, bytes)


async def test_a_piece_without_room_for_its_answer_is_read() -> None:
    calls, call = _opened(window=2 * len(_ANSWER))
    reader = _Reader(calls, call)
    assert await reader.receive(data(_PIECE) * 3) == _ANSWER * 2
    assert await reader.reading == _PIECE[5:]
    assert call.window == 0


async def test_a_window_that_becomes_narrower_counts_for_answers() -> None:
    calls, call = _opened(window=2 * len(_ANSWER))
    reader = _Reader(calls, call)
    assert await reader.receive(data(_PIECE)) == _ANSWER
    calls.receive(settings({Setting.INITIAL_WINDOW_SIZE: len(_ANSWER)}))
    assert await reader.receive(data(_PIECE)) == b""
    assert await reader.reading == _PIECE[5:]


async def test_an_update_of_a_full_window_counts_answers() -> None:
    calls, call = _opened(window=MAX_31_BITS)
    reader = _Reader(calls, call, limit=1 << 20)
    for _ in range(5):
        assert await reader.receive(data(_PIECE)) == _ANSWER
        calls.receive(window_update(1, len(_ANSWER)))
    assert call.window == MAX_31_BITS
    reader.reading.cancel()


@pytest.mark.parametrize(
    "update",
    [window_update(1, 2 * len(_ANSWER)), settings({Setting.INITIAL_WINDOW_SIZE: 4 * len(_ANSWER)})],
    ids=["stream", "settings"],
)
async def test_a_window_that_becomes_wider_has_room_for_answers(update: bytes) -> None:
    calls, call = _opened(window=2 * len(_ANSWER))
    reader = _Reader(calls, call, limit=1 << 20)
    assert await reader.receive(data(_PIECE)) == _ANSWER
    calls.receive(update)
    assert await reader.receive(data(_PIECE) * 4) == _ANSWER * 3
    assert await reader.reading == _PIECE[5:]
    assert call.window == 0


async def test_an_update_answers_no_pieces_when_nobody_reads() -> None:
    reader = _Reader(*_opened(window=1_000))
    await reader.receive()
    reader.reading.cancel()
    await reader.receive()
    assert await reader.receive(window_update(1, 1), data(_PIECE)) == b""
    assert await reader.call.read() == _PIECE[5:]


async def test_no_piece_is_answered_before_the_headers() -> None:
    reader = _Reader(*_opened(window=1_000, is_answered=False))
    assert await reader.receive(data(_PIECE)) == b""
    assert await reader.reading == _PIECE[5:]


async def test_the_client_is_allowed_as_much_as_pieces_took() -> None:
    calls, call = _opened(window=1 << 20)
    reader, piece = _Reader(calls, call, limit=1 << 20), data(_piece(b"data: " + bytes(10_000)))
    for _ in range(40):
        await reader.receive(piece)
    assert call._unallowed <= WINDOW_BYTES // 2
    assert sum(len(passed) for _, passed in reader.counted) > WINDOW_BYTES


@pytest.mark.parametrize("leaves", [True, False])
async def test_no_piece_is_answered_when_nobody_reads(leaves: bool) -> None:
    calls, call = _opened(window=1_000)
    reader = _Reader(calls, call)
    await reader.receive()
    if leaves:
        calls.receive(frame(Kind.RST_STREAM, bytes(4), stream=1))
    else:
        reader.reading.cancel()
    assert await reader.receive(data(_PIECE)) == b""
    reader.reading.cancel()


async def test_pieces_are_no_flood_and_their_frames_without_messages_are() -> None:
    reader = _Reader(*_opened(window=1 << 20), limit=1 << 20)
    for _ in range(3_000):
        await reader.receive(data(_PIECE))
    with pytest.raises(Flood):
        await reader.receive(data(b"") * 2_000)
    reader.reading.cancel()


async def test_a_call_has_one_reader() -> None:
    _, call = _opened(window=1_000)
    reading = asyncio.create_task(call.read())
    await asyncio.sleep(0)
    with pytest.raises(AssertionError):
        await call.read()
    reading.cancel()
