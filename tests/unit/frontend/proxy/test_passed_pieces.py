"""The pieces of a streamed response that are answered without being read, at their exchange."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingResponse,
    ProtocolConfiguration,
)
from kvrouter.frontend.proxy.endpoint_picker import exchange
from kvrouter.frontend.proxy.engine_response import Usage
from kvrouter.net.http2.frames import (
    DATA,
    END_HEADERS,
    HEADER_BYTES,
    PREFACE,
    Kind,
    Setting,
    frame,
    read_frame_header,
    settings,
    window_update,
)
from kvrouter.net.http2.received_call import Received, ReceivedCall
from kvrouter.net.http2.received_calls import ReceivedCalls
from kvrouter.v1.errors import BadRequest

from .test_exchange import _pass, _piece, _Request as _AnyRequest, _run, _sent

_EVENT = b'data: {"a": 1}\n\n'
_SECRET = b'data: {"a": 1, "kv_transfer_params": {"remote_host": "h"}}\n\n'
_SHOWN = b'data: {"a": 1, "kv_transfer_params": null}\n\n'
_USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 7}}\n\n'
_HEADERS = HttpHeaders(headers=HeaderMap(headers=[HeaderValue(key="content-type", raw_value=b"text/event-stream")]))


class _Pick:
    """Counts the tokens of a response."""

    endpoints = ("127.0.0.1:1",)
    overlap_blocks = routed_on = 0

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.booking = SimpleNamespace(room=12, rank=SimpleNamespace(worker_id=1, dp_rank=0))
        self.engine = SimpleNamespace(answered=AsyncMock(), broke_off=AsyncMock())
        self.output_tokens = 0

    def responded(self, tokens: int, *, is_stream: bool) -> None:
        assert is_stream
        self.output_tokens += tokens
        if self.output_tokens > self.booking.room:
            self.booking.room += 16


class _Request(_AnyRequest):
    """A request whose endpoint is chosen at once."""

    pick: Any = None
    usage: Usage | None = None

    async def add(self, body: bytes) -> None:
        if self.pick is not None:
            raise BadRequest("received a body after the whole request")

    async def choose(self) -> Any:
        self.pick = _Pick()
        return self.pick

    def end(self, usage: Any, *, is_stream: bool) -> None:
        self.pick, self.usage = None, usage


class _Gateway:
    """A gateway that shows a streamed response."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, has_key: bool, mode: int) -> None:
        self.request = _Request(None)
        self.request.is_authenticated = has_key
        monkeypatch.setattr(exchange, "GatewayRequest", lambda _picker: self.request)
        begun: list[ReceivedCall] = []
        self.calls = ReceivedCalls(Received(), begun.append)
        block = bytes([0x83, 0x86, 0x44, 4]) + b"/a/B"
        self.calls.receive(PREFACE + settings({Setting.INITIAL_WINDOW_SIZE: 1 << 30}) + window_update(0, 1 << 30))
        self.calls.receive(frame(Kind.HEADERS, block, flags=END_HEADERS, stream=1))
        call = begun[0]
        call.parse = exchange.ProcessingRequest.FromString
        picker: Any = SimpleNamespace(settings=SimpleNamespace(request_timeout_seconds=5.0))
        self._running = asyncio.create_task(_run(exchange.Exchange(call, picker, MagicMock())))
        self._modes = ProtocolConfiguration(
            request_body_mode=ProcessingMode.FULL_DUPLEX_STREAMED, response_body_mode=mode
        )

    async def begin(self) -> _Pick:
        await self.send(_sent(request_headers=HttpHeaders(), protocol_config=self._modes))
        await self.send(_sent(request_body=HttpBody(body=b"{}", end_of_stream=True)))
        await self.send(_sent(response_headers=_HEADERS))
        pick: _Pick = self.request.pick
        return pick

    async def send(self, sent: bytes) -> list[ProcessingResponse]:
        """Returns the answers."""
        self.calls.receive(sent)
        await _pass()
        written, found, position = self.calls.take(), b"", 0
        while position < len(written):
            length, kind, _, _ = read_frame_header(written, position)
            position += HEADER_BYTES + length
            found += written[position - length : position] if kind == DATA else b""
        answers, position = [], 0
        while position < len(found):
            start = position + 5
            position = start + int.from_bytes(found[start - 4 : start], "big")
            answers.append(ProcessingResponse.FromString(found[start:position]))
        return answers

    async def shown(self, *pieces: bytes) -> bytes:
        """Returns what the client gets of further pieces."""
        answers = [answer for piece in pieces for answer in await self.send(_piece(piece))]
        assert len(answers) == len(pieces)
        return b"".join(answer.response_body.response.body_mutation.streamed_response.body for answer in answers)

    def stop(self) -> None:
        self._running.cancel()


async def _began(
    monkeypatch: pytest.MonkeyPatch, *, has_key: bool = False, mode: int = ProcessingMode.FULL_DUPLEX_STREAMED
) -> tuple[_Gateway, _Pick]:
    gateway = _Gateway(monkeypatch, has_key=has_key, mode=mode)
    return gateway, await gateway.begin()


@pytest.mark.parametrize(
    "last",
    [
        _piece(_EVENT, ends=True),
        _sent(response_trailers=HttpTrailers()),
        _sent(request_body=HttpBody(body=b"{}")),
    ],
    ids=["end", "trailers", "refusal"],
)
async def test_nothing_is_kept_of_pieces_after_the_end(monkeypatch: pytest.MonkeyPatch, last: bytes) -> None:
    gateway, pick = await _began(monkeypatch)
    assert await gateway.shown(_EVENT, _EVENT) == _EVENT * 2
    assert gateway.calls.streams
    await gateway.send(last)
    assert gateway.request.pick is None
    assert pick.output_tokens == 2 + (b"data:" in last)
    for sent in (_piece(_EVENT), _sent(response_headers=_HEADERS), _piece(_EVENT)):
        await gateway.send(sent)
        assert not gateway.calls.streams
    gateway.stop()


async def test_headers_that_are_shown_again_lose_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, pick = await _began(monkeypatch)
    await gateway.shown(*[_EVENT] * 10)
    await gateway.send(_sent(response_headers=_HEADERS))
    assert pick.output_tokens == 10
    await gateway.send(_piece(_EVENT, ends=True))
    assert pick.output_tokens == 11
    gateway.stop()


@pytest.mark.parametrize("at", range(1, len(_SECRET)))
async def test_an_event_that_ends_in_another_piece_keeps_its_place(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    gateway, _ = await _began(monkeypatch, has_key=True)
    shown = await gateway.shown(_EVENT, _SECRET[:at], _SECRET[at:], _EVENT)
    assert shown == _EVENT + _SHOWN + _EVENT
    gateway.stop()


@pytest.mark.parametrize("at", range(1, len(_EVENT)))
async def test_an_event_without_secrets_keeps_its_place(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    gateway, _ = await _began(monkeypatch, has_key=True)
    assert await gateway.shown(_EVENT) == _EVENT
    assert await gateway.shown(_EVENT[:at]) == b""
    assert await gateway.shown(_EVENT[at:]) == _EVENT
    gateway.stop()


async def test_a_gateway_that_does_not_take_pieces_back_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, _ = await _began(monkeypatch, mode=ProcessingMode.STREAMED)
    for _ in range(3):
        (answer,) = await gateway.send(_piece(_EVENT))
        assert answer.HasField("response_body")
        assert not answer.response_body.response.HasField("body_mutation")
    assert gateway.calls.streams
    gateway.stop()


@pytest.mark.parametrize("at", range(1, len(_USAGE)))
async def test_usage_is_read_across_passed_and_read_pieces(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    gateway, _ = await _began(monkeypatch)
    assert await gateway.shown(_EVENT, _EVENT, _USAGE[:at]) == _EVENT * 2 + _USAGE[:at]
    await gateway.send(_piece(_USAGE[at:], ends=True))
    assert gateway.request.usage is not None
    assert gateway.request.usage.completion_tokens == 7
    gateway.stop()


async def test_a_stream_counts_when_its_booking_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, pick = await _began(monkeypatch)
    for piece, counted in enumerate([1] * 12 + [13] * 16 + [29], 1):
        await gateway.shown(_EVENT)
        assert pick.output_tokens == counted, piece
    gateway.stop()
