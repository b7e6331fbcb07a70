"""What decides which calls a peer may make, before anything that it sends is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import grpc.aio

Context = grpc.aio.ServicerContext[Any, Any]


class Peer(Protocol):
    """Who opened a connection, with the credential that it showed."""

    def open_stream(self, methods: Sequence[str]) -> None:
        """Checks that the peer may call one of the methods, such as kvrouter.v1.IndexerService/FindMatches.

        Raises:
            KvRouterError: it may call none of them, or its credential is no longer valid.
        """
        ...

    def check(self, method: str) -> None:
        """Checks that the peer may call a method.

        Raises:
            KvRouterError: it may not call it.
        """
        ...


class PeerCheck(Protocol):
    """Finds out who calls."""

    def peer(self, context: Context) -> Peer:
        """Returns the peer of a call."""
        ...
