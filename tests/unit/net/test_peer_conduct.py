"""Connections that flood a server with calls without a credential are closed, others are not."""

from __future__ import annotations

import asyncio
import socket

import pytest
from kvrouter.net.rpc import peer_conduct
from kvrouter.net.rpc.peer_conduct import PeerConduct, close_connections


class Connection:
    """A connection over loopback whose server's end is in this process."""

    def __init__(self, host: str) -> None:
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
            self.client = socket.create_connection(listening.getsockname()[:2], timeout=10)
            self.server, _ = listening.accept()
        name = self.client.getsockname()
        self.address = (str(name[0]), int(name[1]))
        self.peer = f"ipv6:%5B{name[0]}%5D:{name[1]}" if ":" in host else f"ipv4:{name[0]}:{name[1]}"
        self.client.setblocking(False)

    @property
    def is_open(self) -> bool:
        try:
            return self.client.recv(1) != b""
        except BlockingIOError:
            return True

    def close(self) -> None:
        self.client.close()
        self.server.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_only_the_connections_that_are_named_are_closed(host: str) -> None:
    one, two = Connection(host), Connection(host)
    assert close_connections({one.address}) == 1
    assert not one.is_open
    assert two.is_open
    assert close_connections({("192.0.2.1", 1)}) == 0
    one.close()
    two.close()


async def test_a_flood_closes_its_connection_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_conduct, "_SWEEP_SECONDS", 0.0)
    conduct = PeerConduct()
    flooding, probing, admitted = connections = [Connection("127.0.0.1") for _ in range(3)]
    conduct.admitted(admitted.peer)
    for _ in range(100):
        conduct.without_credential(flooding.peer)
        conduct.without_credential(admitted.peer)
    conduct.without_credential(probing.peer)
    async with asyncio.timeout(30):
        while not conduct.closed:
            await asyncio.sleep(0)
    assert [connection.is_open for connection in connections] == [False, True, True]
    for connection in connections:
        connection.close()


async def test_a_connection_that_makes_an_admitted_call_in_time_is_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_conduct, "_SWEEP_SECONDS", 0.0)
    conduct = PeerConduct()
    flooding, admitted = Connection("127.0.0.1"), Connection("127.0.0.1")
    for _ in range(100):
        conduct.without_credential(flooding.peer)
        conduct.without_credential(admitted.peer)
    conduct.admitted(admitted.peer)
    async with asyncio.timeout(30):
        while not conduct.closed:
            await asyncio.sleep(0)
    assert [flooding.is_open, admitted.is_open] == [False, True]
    for connection in (flooding, admitted):
        connection.close()


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_conduct, "_MAX_PEERS", 10)
    conduct = PeerConduct()
    for port in range(1, 100):
        conduct.admitted(f"ipv4:192.0.2.1:{port}")
        conduct.without_credential(f"ipv4:192.0.2.2:{port}")
    assert len(conduct._admitted) == len(conduct._allowances) == 10


@pytest.mark.parametrize("peer", ["unix:/tmp/a", "ipv4:garbage", "ipv4:1.2.3.4:x", "ipv4:300.1.1.1:5", ""])
async def test_a_peer_without_an_address_is_left_alone(peer: str) -> None:
    conduct = PeerConduct()
    for _ in range(100):
        conduct.without_credential(peer)
    assert not conduct._closing
