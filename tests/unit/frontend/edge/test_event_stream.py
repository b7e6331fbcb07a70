"""Events of a response: those that differ only in a token, and when they are written."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import HttpVersion10, HttpVersion11, web
from kvrouter.core import Observations, TokenWriter
from kvrouter.frontend.edge.event_stream import EventStream, JsonResponse, StepWriter
from kvrouter.v1.worker_pb2 import GenerateOutput, WorkerServiceGenerateResponse


class Connection(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.writes = 0
        self.closing = False

    def write(self, data: Any) -> None:
        self.written += data
        self.writes += 1

    def is_closing(self) -> bool:
        return self.closing


def opened(
    version: Any, writer: StepWriter | None = None, headers: Mapping[str, str] = MappingProxyType({})
) -> tuple[EventStream, Connection, SimpleNamespace]:
    connection = Connection()
    protocol = SimpleNamespace(writing_paused=False, transport=connection)
    request = SimpleNamespace(version=version, keep_alive=True, protocol=protocol)
    return EventStream(cast(web.Request, request), writer or StepWriter(), headers=headers), connection, protocol


def take(writer: TokenWriter, token: int) -> bool:
    writer.begin(1, 0, Observations([1]), int)
    writer.limit = 1
    writer.worker = SimpleNamespace(pieces=0, missed=0)
    return writer.take(WorkerServiceGenerateResponse(output=GenerateOutput(token_ids=[token])).SerializeToString())


async def step() -> None:
    """Returns after a step of the event loop."""
    await asyncio.sleep(0)


@pytest.mark.parametrize("version", [HttpVersion10, HttpVersion11])
async def test_the_events_of_a_token_writer_are_those_that_are_formatted_one_by_one(version: Any) -> None:
    stream, connection, _ = opened(version)
    stream.write_event(b"first")
    events = stream.token_writer(b'{"id":[', b"]}")
    for number in (0, 9, 10, 65_535, (1 << 32) - 1):
        await step()
        connection.written = b""
        assert take(events, number)
        await step()
        numbered, connection.written = connection.written, b""
        stream.write_event(b'{"id":[%d]}' % number)
        await step()
        assert numbered == connection.written != b""


async def test_nothing_is_written_while_the_client_does_not_read_or_is_gone() -> None:
    stream, connection, protocol = opened(HttpVersion11)
    stream.write_event(b"first")
    events = stream.token_writer(b"", b"")
    await step()
    connection.written = b""
    protocol.writing_paused = True
    assert not take(events, 1)
    protocol.writing_paused, connection.closing = False, True
    assert take(events, 1), "the output of a client that left is dropped, not kept"
    await step()
    assert not connection.written


def test_a_token_writer_needs_a_response_that_has_begun() -> None:
    with pytest.raises(RuntimeError, match="has begun"):
        opened(HttpVersion11)[0].token_writer(b"", b"")


async def test_what_clients_get_in_a_step_is_one_write_for_each() -> None:
    writer = StepWriter()
    streams = [opened(HttpVersion11, writer) for _ in range(2)]
    for stream, _, _ in streams:
        stream.write_event(b"first")
        assert take(stream.token_writer(b"", b""), 2)
    assert not any(connection.writes for _, connection, _ in streams)
    await step()
    for _, connection, _ in streams:
        assert connection.writes == 1
        assert connection.written.index(b"data: first") < connection.written.index(b"data: 2")


async def test_a_response_is_written_before_its_handler_returns() -> None:
    stream, connection, _ = opened(HttpVersion11)
    stream.write_event(b"[DONE]")
    stream.end()
    assert connection.writes == 1
    assert connection.written.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_response_with_a_length_is_written_at_once() -> None:
    writer = StepWriter()
    stream, connection, _ = opened(HttpVersion11, writer, {"Content-Length": "2", "x-odd": "\udcff"})
    stream.write_bytes(b"{}")
    stream.end()
    assert not writer.pending
    head, _, body = connection.written.partition(b"\r\n\r\n")
    assert (connection.writes, body, stream.keep_alive) == (1, b"{}", True)
    assert b"\r\nContent-Length: 2\r\nx-odd: \xef\xbf\xbd\r\n" in head
    assert b"chunked" not in head


async def test_a_client_that_has_left_does_not_stop_the_writes_of_others() -> None:
    writer = StepWriter()
    (gone, left, _), (stream, connection, _) = opened(HttpVersion11, writer), opened(HttpVersion11, writer)
    gone.write_event(b"lost")
    stream.write_event(b"kept")
    left.closing = True
    await step()
    assert not left.written
    assert b"data: kept" in connection.written


@pytest.mark.parametrize(("version", "ends"), [(HttpVersion11, b""), (HttpVersion10, b"Connection: keep-alive\r\n")])
def test_a_whole_response_is_one_write(version: Any, ends: bytes) -> None:
    connection = Connection()
    request = SimpleNamespace(version=version, keep_alive=True, protocol=SimpleNamespace(transport=connection))
    response = JsonResponse(cast(web.Request, request), b"{}", {"x-request-id": "a"})
    head, _, body = connection.written.partition(b"\r\n\r\n")
    assert (connection.writes, body, response.keep_alive) == (1, b"{}", True)
    assert head.startswith(b"HTTP/1.%d 200 OK\r\nx-request-id: a\r\n" % version.minor)
    assert b"\r\nContent-Type: application/json; charset=utf-8\r\nContent-Length: 2\r\n" in head
    assert (head + b"\r\n").endswith(b" GMT\r\n" + ends)
    with pytest.raises(ValueError, match="line breaks"):
        JsonResponse(cast(web.Request, request), b"{}", {"x-request-id": "a\r\nb: c"})
