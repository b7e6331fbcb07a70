"""Decides whether a call may run, before reading its request."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvrouter.net.auth import CallerCheck, CallerPeer
from kvrouter.net.http2 import ReceivedCall
from kvrouter.v1.errors import KvRouterError, Unauthenticated

Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]
"""Metadata of a call, as its client sent it."""

UNGUARDED: AbstractContextManager[None] = nullcontext()
"""The context of a call that nothing guards."""


class Guard(Protocol):
    """Authenticates callers."""

    def check(self, method: str, metadata: Metadata) -> None:
        """Authenticates the caller of a call whose request has not been read, and counts nothing.

        Raises:
            KvRouterError: the call is refused.
        """

    def admit(self, method: str, metadata: Metadata, size: int) -> AbstractContextManager[None]:
        """Authenticates at once, and returns a context in which the request is parsed and the call runs.

        Args:
            method: The method's path on the wire, such as /kvrouter.v1.FrontendService/Generate.
            metadata: Metadata of the call, or of its call stream.
            size: Size of the encoded request, bytes; 0 for a stream of requests.

        Raises:
            KvRouterError: the call is refused. The context may raise it too when it begins.
        """


class GuardedPeers:
    """Admits a peer by its certificate and token, then by the guard of the service. Implements kvrouter.net's check."""

    def __init__(self, callers: CallerCheck | None = None) -> None:
        """``callers`` decides which processes may call which methods; None permits all."""
        self._callers = callers if callers is not None and callers.applies else None
        self._guards: dict[str, Guard] = {}

    def add(self, service: str, guard: Guard) -> None:
        """Guards a service, such as kvrouter.v1.FrontendService."""
        self._guards[service] = guard

    def peer(self, context: ReceivedCall) -> GuardedPeer | None:
        """Returns the peer of a call; None for one that may call all methods."""
        if self._callers is None and not self._guards:
            return None
        caller = None if self._callers is None else self._callers.peer(context)
        return GuardedPeer(caller, self._guards, context.invocation_metadata())


@dataclass(frozen=True, slots=True)
class GuardedPeer:
    """Who opened a connection. Implements kvrouter.net.calls.Peer."""

    caller: CallerPeer | None
    guards: dict[str, Guard]
    metadata: Metadata

    def open_stream(self, methods: Sequence[str]) -> None:
        """Admits a peer of one of the methods.

        Raises:
            KvRouterError: it may call none of them.
        """
        if self.caller is not None:
            self.caller.open_stream(methods)
            methods = [method for method in methods if self.caller.may_call(method)]
        refused: Unauthenticated | None = None
        # One method of each service: a credential is one for all of them, whatever its role permits.
        for method in {_service(method): method for method in reversed(methods)}.values():
            guard = self.guards.get(_service(method))
            if guard is None:
                return
            try:
                guard.check(f"/{method}", self.metadata)
            except Unauthenticated as error:
                refused = error
            except KvRouterError:
                return
            else:
                return
        if refused is not None:
            raise refused

    def check(self, method: str) -> None:
        """Admits a peer to a method now. Its guard counts the call when the size of its request is known.

        Raises:
            KvRouterError: it may not call it.
        """
        if self.caller is not None:
            self.caller.check(method)
        guard = self.guards.get(_service(method))
        if guard is not None:
            guard.check(f"/{method}", self.metadata)


def _service(method: str) -> str:
    return method.partition("/")[0]
