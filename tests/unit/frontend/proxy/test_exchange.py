"""The order of the messages of one request at a gateway."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from kvrouter.frontend.proxy.endpoint_picker import exchange
from kvrouter.net.http2.frames import END_HEADERS, END_STREAM, PREFACE, Kind, frame, settings
from kvrouter.net.http2.received_call import Received, ReceivedCall
from kvrouter.net.http2.received_calls import ReceivedCalls

_MODES = ProtocolConfiguration(
    request_body_mode=ProcessingMode.FULL_DUPLEX_STREAMED, response_body_mode=ProcessingMode.FULL_DUPLEX_STREAMED
)


class _Request:
    """A request whose endpoint is chosen when the test says so."""

    chosen: ClassVar[asyncio.Event]
    id = "request"
    pick = None
    is_authenticated = False
    has_caller = True
    body_is_changed = False

    def __init__(self, _picker: object) -> None:
        self.body = bytearray()

    def begin(self, message: ProcessingRequest) -> None:
        pass

    async def add(self, body: bytes) -> None:
        pass

    async def choose(self) -> Any:
        await self.chosen.wait()
        return SimpleNamespace(endpoints=["127.0.0.1:1"], headers={})

    def added_headers(self) -> dict[str, str]:
        return {}

    def removed_headers(self) -> set[str]:
        return set()

    def end(self, usage: object, *, is_stream: bool) -> None:
        pass


def _sent(**fields: Any) -> bytes:
    message = ProcessingRequest(**fields).SerializeToString()
    return frame(Kind.DATA, b"\0" + len(message).to_bytes(4, "big") + message, stream=1)


def _piece(body: bytes, *, ends: bool = False) -> bytes:
    return _sent(response_body=HttpBody(body=body, end_of_stream=ends))


async def _run(exchanged: exchange.Exchange) -> None:
    assert await exchanged.open()
    await exchanged.run()


async def _pass() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("during_choice", [[], [b"1"], [b"1", b"2"]])
async def test_pieces_of_an_early_response_keep_their_order(
    monkeypatch: pytest.MonkeyPatch, during_choice: list[bytes]
) -> None:
    monkeypatch.setattr(exchange, "GatewayRequest", _Request)
    _Request.chosen = asyncio.Event()
    begun: list[ReceivedCall] = []
    calls = ReceivedCalls(Received(), begun.append)
    block = bytes([0x83, 0x86, 0x44, 4]) + b"/a/B"
    calls.receive(PREFACE + settings({}) + frame(Kind.HEADERS, block, flags=END_HEADERS, stream=1))
    call, answered = begun[0], []

    write = ReceivedCall.write

    async def written(call: ReceivedCall, message: bytes) -> None:
        answer = ProcessingResponse.FromString(message)
        answered.append(answer.response_body.response.body_mutation.streamed_response.body)
        await write(call, message)

    monkeypatch.setattr(ReceivedCall, "write", written)
    call.parse = ProcessingRequest.FromString
    picker: Any = SimpleNamespace(settings=SimpleNamespace(request_timeout_seconds=5.0))
    running = asyncio.create_task(_run(exchange.Exchange(call, picker, MagicMock())))
    for sent in (
        _sent(request_headers=HttpHeaders(), protocol_config=_MODES),
        _sent(response_headers=HttpHeaders()),
        _sent(request_body=HttpBody(body=b"{}", end_of_stream=True)),
        *map(_piece, during_choice),
    ):
        calls.receive(sent)
        await _pass()
    _Request.chosen.set()
    await _pass()
    for body in (b"3", b"4"):
        calls.receive(_piece(body))
        await _pass()
    calls.receive(_piece(b"5", ends=True) + frame(Kind.DATA, b"", flags=END_STREAM, stream=1))
    await asyncio.wait_for(running, 10)
    assert [body for body in answered if body] == [*during_choice, b"3", b"4", b"5"]
