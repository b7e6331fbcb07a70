"""Addresses are read without a resolver."""

from __future__ import annotations

import socket

import pytest
from kvrouter.net.http2.connecting import addresses_of, family_of, host_and_port


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("[::1]:65535", ("::1", 65535)),
        ("worker-1.pool:7", ("worker-1.pool", 7)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
        ("[::ffff:1.2.3.4]:80", ("::ffff:1.2.3.4", 80)),
    ],
)
def test_a_target_is_host_and_port(target: str, expected: tuple[str, int]) -> None:
    assert host_and_port(target) == expected


@pytest.mark.parametrize(
    "target",
    [
        *("", "host", "host:", ":80", "::1:80", "[::1]", "host:65536", "host:-1", "http://h:1"),
        *("h/p:80", "h?x:80", "h#x:80", "u@h:80", "h x:80"),
        *("[name]:80", "[cafe]:80", "[1.2.3.4]:80", "[::1 ]:80", "[]:80"),
    ],
)
def test_another_target_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        host_and_port(target)


async def test_an_ip_address_is_not_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [family_of(host) for host in ("127.0.0.1", "::1", "localhost", "1.2", "a\0b")] == [
        socket.AF_INET,
        socket.AF_INET6,
        None,
        None,
        None,
    ]
    monkeypatch.setattr(socket, "getaddrinfo", None)
    assert [await addresses_of(host, 80) for host in ("127.0.0.1", "::1", "fe80::1%eth0")] == [
        ["127.0.0.1"],
        ["::1"],
        ["fe80::1%eth0"],
    ]
