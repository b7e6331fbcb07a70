"""Events that differ only in a number, against events that are formatted one by one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import HttpVersion10, HttpVersion11, web
from kvrouter.frontend.api.event_stream import EventStream


class Connection(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closing = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closing


def opened(version: Any) -> tuple[EventStream, Connection, SimpleNamespace]:
    connection, protocol = Connection(), SimpleNamespace(writing_paused=False)
    request = SimpleNamespace(version=version, keep_alive=True, protocol=protocol, transport=connection)
    return EventStream(cast(web.Request, request)), connection, protocol


@pytest.mark.parametrize("version", [HttpVersion10, HttpVersion11])
def test_numbered_events_are_those_that_are_formatted_one_by_one(version: Any) -> None:
    stream, connection, _ = opened(version)
    stream.write_event(b"first")
    events = stream.numbered(b'{"id":[', b"]}")
    for number in (0, 9, 10, 65_535, (1 << 32) - 1):
        connection.written = b""
        assert events.write(number)
        numbered, connection.written = connection.written, b""
        stream.write_event(b'{"id":[%d]}' % number)
        assert numbered == connection.written


def test_nothing_is_written_while_the_client_does_not_read_or_is_gone() -> None:
    stream, connection, protocol = opened(HttpVersion11)
    stream.write_event(b"first")
    events = stream.numbered(b"", b"")
    connection.written = b""
    protocol.writing_paused = True
    assert not events.write(1)
    protocol.writing_paused, connection.closing = False, True
    assert events.write(1), "the output of a client that left is dropped, not kept"
    assert not connection.written


def test_numbered_events_need_a_response_that_has_begun() -> None:
    with pytest.raises(RuntimeError, match="has begun"):
        opened(HttpVersion11)[0].numbered(b"", b"")
