"""Streams of the endpoint picker that bring no request, or none with a credential, take no room from others."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import grpc.aio
import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody, HttpHeaders
from kvrouter.frontend.proxy.endpoint_picker import server

from ....hostile_peer import hostile_peer
from ....waiting import until
from ..gateway import MODEL
from .gateway_stream import MODES, headers
from .picking import Gateway

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
BODY = {"model": MODEL, "prompt": list(range(100)), "max_tokens": 8}


@pytest.fixture(autouse=True)
def few_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MOST_OPENING", 4)


async def until_routed(gateway: Gateway, endpoint: str) -> None:
    async with asyncio.timeout(30):
        while True:
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                assert (await gateway.stream().routed(BODY))[0] == [endpoint]
                return


async def test_streams_without_a_request_are_evicted(gateway: Gateway) -> None:
    endpoint = await gateway.add_engine(1)
    async with hostile_peer(gateway.address) as peer:
        for _ in range(10):
            peer.open(PROCESS)
        await until(lambda: len(peer.ended) == 6)
        assert (await gateway.stream().routed(BODY))[0] == [endpoint]
        await until(lambda: len(peer.ended) == 7)


async def test_streams_with_a_request_are_not_evicted(gateway: Gateway) -> None:
    await gateway.add_engine(1)
    streams = []
    for _ in range(10):
        streams.append(gateway.stream())
        await streams[-1].routed(BODY)
    async with hostile_peer(gateway.address) as peer:
        for _ in range(10):
            peer.open(PROCESS)
        await until(lambda: len(peer.ended) == 6)
        for stream in streams:
            assert await stream.respond(b"output") == b"output"


async def test_a_stream_that_sends_nothing_ends(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_OPENING_SECONDS", 0.1)
    stream = gateway.stream()
    assert await stream.call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_many_streams_that_send_nothing_end_their_connection(gateway: Gateway) -> None:
    endpoint = await gateway.add_engine(1)
    async with hostile_peer(gateway.address) as peer:
        for _ in range(100):
            peer.open(PROCESS)
        await until(peer.reader.at_eof)
    # Streams of the closed connection may still begin, and evict.
    await until_routed(gateway, endpoint)


async def test_a_body_without_headers_is_not_kept(gateway: Gateway) -> None:
    stream = gateway.stream()
    await stream.send(request_body=HttpBody(body=bytes(1000)))
    assert await stream.call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_stream_is_one_request(gateway: Gateway) -> None:
    await gateway.add_engine(1)
    stream = gateway.stream()
    for _ in range(2):
        await stream.send(request_headers=HttpHeaders(headers=headers()), protocol_config=MODES)
    assert await stream.call.code() is grpc.StatusCode.INVALID_ARGUMENT
    await gateway.until_booked(0)


async def test_a_gateway_may_show_a_response_of_its_own(gateway: Gateway) -> None:
    assert await gateway.stream().respond(b"from the gateway") == b""  # It passes unchanged.


async def test_headers_of_a_request_come_before_its_response(gateway: Gateway) -> None:
    await gateway.add_engine(1)
    stream = gateway.stream()
    await stream.send(response_headers=HttpHeaders(headers=headers()))
    await stream.receive()
    await stream.send(request_headers=HttpHeaders(headers=headers()), protocol_config=MODES)
    assert await stream.call.code() is grpc.StatusCode.INVALID_ARGUMENT
