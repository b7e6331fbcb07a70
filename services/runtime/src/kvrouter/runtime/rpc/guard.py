"""What decides whether a call may run, before its method is called."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeAlias

Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]
"""Metadata of a call, as its client sent it."""

UNGUARDED: AbstractContextManager[None] = nullcontext()
"""The context of a call that nothing guards."""


class Guard(Protocol):
    """Authenticates callers."""

    def admit(self, method: str, metadata: Metadata, size: int) -> AbstractContextManager[None]:
        """Authenticates at once, and returns a context in which the request is parsed and the call runs.

        Args:
            method: The method's path on the wire, such as /kvrouter.v1.FrontendService/Generate.
            metadata: Metadata of the call, or of the call stream that carries it.
            size: Size of the encoded request, bytes; 0 for a stream of requests.

        Raises:
            KvRouterError: the call is refused. The context may raise it too when it begins.
        """
        ...
