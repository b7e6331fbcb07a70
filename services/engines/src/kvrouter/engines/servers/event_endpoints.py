"""Addresses of an engine's event sockets, as they are reached from elsewhere."""

from __future__ import annotations

from urllib.parse import urlsplit

_WILDCARDS = frozenset({"*", "0.0.0.0", "::", "[::]", ""})  # noqa: S104 - compared, not listened on


def at_host(endpoint: str, host: str) -> str:
    """Returns an endpoint that an engine listens on as others connect to it: a wildcard is the engine's host."""
    name, colon, port = urlsplit(endpoint).netloc.rpartition(":")
    if not endpoint.startswith("tcp://") or not colon or name not in _WILDCARDS:
        return endpoint
    return tcp(host, int(port)) if port.isdecimal() else endpoint


def tcp(host: str, port: int) -> str:
    """Returns the endpoint of a TCP socket."""
    host = host.strip("[]")
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
