"""Connects to etcd."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import aetcd
import grpc

CALL_SECONDS = 3.0
"""Timeout of a call."""
_RETRY_SECONDS = (0.25, 2.0)  # first and maximum pause; random, so that a fleet does not reconnect at one moment
_CHANNEL_OPTIONS = {
    # Each client has its own connection, and redials soon: gRPC's default back-off grows to two minutes.
    "grpc.use_local_subchannel_pool": 1,
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,
    # Detects a peer that vanished without closing. etcd refuses pings more often than every 5 s.
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 5_000,
    # A listing of 10,000 workers takes a few megabytes; the default limit is 4 MiB.
    "grpc.max_receive_message_length": 64 << 20,
}


class InvalidEndpoint(ValueError):
    """An etcd endpoint is not ``host:port``."""


class EtcdAway(Exception):
    """None of the etcd endpoints answers."""


# A call on a stream that has just ended raises InvalidStateError.
AWAY = (EtcdAway, aetcd.ClientError, grpc.aio.AioRpcError, TimeoutError, OSError, asyncio.InvalidStateError)
"""Exceptions that calls raise while etcd is away. Try again later."""


def parse_endpoints(endpoints: str) -> tuple[tuple[str, int], ...]:
    """Parses endpoints as ``host:port`` or ``http://host:port``, separated by commas.

    Raises:
        InvalidEndpoint: an endpoint has another form, or a scheme other than http.
    """
    parsed = []
    for text in filter(None, (part.strip() for part in endpoints.split(","))):
        url = urlsplit(text if "://" in text else f"http://{text}")
        try:
            host, port = url.hostname, url.port
        except ValueError as error:
            raise InvalidEndpoint(f"etcd endpoint {text!r}: {error}") from None
        if url.scheme != "http" or not host or port is None or url.path.strip("/"):
            raise InvalidEndpoint(f"etcd endpoint {text!r}: expected host:port or http://host:port")
        parsed.append((f"[{host}]" if ":" in host else host, port))
    if not parsed:
        raise InvalidEndpoint("expected an etcd endpoint as host:port, received none")
    return tuple(parsed)


@asynccontextmanager
async def connect(endpoints: str) -> AsyncIterator[aetcd.Client]:
    """Connects to the first endpoint that answers, while the context lasts. Calls time out after 3 s.

    Raises:
        InvalidEndpoint: an endpoint is malformed.
        EtcdAway: none of the endpoints answers.
    """
    errors = []
    for host, port in parse_endpoints(endpoints):
        async with aetcd.Client(host, port, timeout=CALL_SECONDS, options=_CHANNEL_OPTIONS) as client:
            try:
                await client.get(b"kvrouter-probe")
            except AWAY as error:
                errors.append(f"{host}:{port}: {error}")
                continue
            yield client
            return
    raise EtcdAway("; ".join(errors))


async def pause(failures: int) -> None:
    """Waits before the next attempt, longer after each consecutive failure."""
    first, longest = _RETRY_SECONDS
    await asyncio.sleep(min(longest, first * 2.0 ** min(failures - 1, 16)) * random.uniform(0.5, 1.5))
