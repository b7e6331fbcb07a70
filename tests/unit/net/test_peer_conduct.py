"""Connections that flood a server with calls without a credential are closed, others are not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import grpc.aio
import pytest
from kvrouter.net.http2.frames import END_HEADERS, END_STREAM, PREFACE, Kind, frame
from kvrouter.net.http2.received_call import Received, ReceivedCall
from kvrouter.net.http2.received_calls import ReceivedCalls
from kvrouter.net.http2.side import Flood
from kvrouter.net.rpc import peer_conduct
from kvrouter.net.rpc.call_gate import CallGate
from kvrouter.net.rpc.loop_server import LoopServer
from kvrouter.net.rpc.peer_conduct import PeerConduct

from ...hostile_peer import hostile_peer, request_headers


class Connection:
    """A connection with a call, and whether it is closed."""

    def __init__(self) -> None:
        begun: list[ReceivedCall] = []
        self.closed: list[Exception] = []
        self.calls = ReceivedCalls(Received(), begun.append)
        self.calls.end = self.closed.append
        headers = frame(Kind.HEADERS, request_headers("/a/B"), flags=END_HEADERS | END_STREAM, stream=1)
        self.calls.receive(PREFACE + headers)
        (self.call,) = begun


async def until_closed(conduct: PeerConduct) -> None:
    async with asyncio.timeout(30):
        while not conduct.closed:
            await asyncio.sleep(0.001)


async def test_a_flood_closes_its_connection_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_conduct, "_GRACE_SECONDS", 0.0)
    conduct = PeerConduct()
    flooding, probing, admitted = connections = [Connection() for _ in range(3)]
    conduct.admitted(admitted.call)
    for _ in range(100):
        conduct.without_credential(flooding.call)
        conduct.without_credential(admitted.call)
    conduct.without_credential(probing.call)
    await until_closed(conduct)
    assert [len(each.closed) for each in connections] == [1, 0, 0]
    assert isinstance(flooding.closed[0], Flood)
    assert conduct.closed == 1


async def test_connections_that_make_an_admitted_call_in_time_or_have_ended_are_not_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_conduct, "_GRACE_SECONDS", 0.0)
    conduct = PeerConduct()
    _, admitted, left = connections = [Connection() for _ in range(3)]
    for each in connections:
        while not conduct.without_credential(each.call):
            pass
    conduct.admitted(admitted.call)
    left.calls.is_over = True
    await until_closed(conduct)
    assert [len(each.closed) for each in connections] == [1, 0, 0]
    assert conduct.closed == 1


async def test_many_connections_that_flood_together_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(peer_conduct, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(peer_conduct, "_GRACE_SECONDS", 0.0)
    conduct = PeerConduct()
    connections = [Connection() for _ in range(1000)]
    closing: list[bool] = []
    for _ in range(6):
        for each in connections:
            now += 1 / len(connections)
            closing.append(conduct.without_credential(each.call))
    assert any(closing)
    assert not any(closing[: 2 * len(connections)])
    await until_closed(conduct)
    assert conduct.closed == len(connections), "each made one call a second"


async def test_a_server_closes_the_connection_of_a_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_conduct, "_GRACE_SECONDS", 0.0)
    gate = CallGate()
    server = LoopServer(gate)
    address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
    try:
        async with grpc.aio.insecure_channel(address) as channel, hostile_peer(address) as flooding:
            assert await channel.unary_unary("/no.such/Method")(b"").code() is grpc.StatusCode.UNIMPLEMENTED
            for _ in range(100):
                flooding.open("/no.such/Method", ends=True)
            async with asyncio.timeout(30):
                while not flooding.reader.at_eof():
                    await asyncio.sleep(0.001)
            assert gate.conduct.closed == 1
            assert len(server.connections) == 1
            assert await channel.unary_unary("/no.such/Method")(b"").code() is grpc.StatusCode.UNIMPLEMENTED
    finally:
        await server.stop(0.0)
