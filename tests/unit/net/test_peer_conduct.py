"""Connections that flood a server with calls without a credential are closed, others are not."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace

import pytest
from kvrouter.net.rpc import peer_conduct
from kvrouter.net.rpc.peer_conduct import PeerConduct, close_connections


class Connection:
    """A connection over loopback whose server's end is in this process."""

    def __init__(self, host: str, server_port: int = 0, client_port: int = 0) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, server_port), family=family) as listening:
            self.client = socket.socket(family)
            self.client.settimeout(10)
            self.client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.client.bind((host, client_port))
            self.client.connect(listening.getsockname()[:2])
            self.server, _ = listening.accept()
        name = self.client.getsockname()
        self.address = (str(name[0]), int(name[1]))
        self.port = int(self.server.getsockname()[1])
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
    one = Connection(host)
    two = Connection(host, one.port)
    # A peer may use one of its ports for connections to several ports.
    of_another_port = Connection(host, client_port=one.address[1])
    assert of_another_port.address == one.address
    assert close_connections({one.address}, one.port) == 1
    assert not one.is_open
    assert two.is_open
    assert of_another_port.is_open
    assert close_connections({("192.0.2.1", 1)}, one.port) == 0
    for connection in (one, two, of_another_port):
        connection.close()


async def test_a_flood_closes_its_connection_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_conduct, "_SWEEP_SECONDS", 0.0)
    conduct = PeerConduct()
    flooding = Connection("127.0.0.1")
    conduct.port = flooding.port
    probing, admitted = (Connection("127.0.0.1", flooding.port) for _ in range(2))
    connections = (flooding, probing, admitted)
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
    flooding = Connection("127.0.0.1")
    conduct.port = flooding.port
    admitted = Connection("127.0.0.1", flooding.port)
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


async def test_many_connections_that_flood_together_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(peer_conduct, "time", SimpleNamespace(monotonic=lambda: now))
    conduct = PeerConduct()
    peers = [f"ipv4:192.0.2.1:{port}" for port in range(1, 1001)]
    closing: list[bool] = []
    for _ in range(6):
        for peer in peers:
            now += 1 / len(peers)
            closing.append(conduct.without_credential(peer))
    assert len(conduct._closing) == len(peers), "each made one call a second"
    assert any(closing)
    assert not any(closing[: 2 * len(peers)])


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
