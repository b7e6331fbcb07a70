"""Decides which calls a peer may make, before reading any of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import grpc.aio

Context = grpc.aio.ServicerContext[Any, Any]


class Peer(Protocol):
    """Who opened a connection, with the credential it showed."""

    def open_stream(self, methods: Sequence[str]) -> None:
        """Admits a peer of one of the methods, such as kvrouter.v1.IndexerService/FindMatches.

        Raises:
            KvRouterError: it may call none of them, or its credential is no longer valid.
        """
        ...

    def check(self, method: str) -> None:
        """Admits a peer to a method.

        Raises:
            KvRouterError: it may not call it.
        """
        ...


class PeerCheck(Protocol):
    """Finds out who calls."""

    def peer(self, context: Context) -> Peer:
        """Returns the peer of a call."""
        ...
