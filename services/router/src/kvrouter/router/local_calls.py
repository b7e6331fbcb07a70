"""Calls of a Frontend's methods in the same process."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from google.protobuf.message import Message
from kvrouter.runtime.contracts import Frontend
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc.methods import methods_by_python_name
from kvrouter.v1 import frontend_pb2

_NAMES = {
    method.name: name
    for name, method in methods_by_python_name(frontend_pb2.DESCRIPTOR.services_by_name["FrontendService"]).items()
}


class LocalCalls:
    """Calls the object behind a Frontend's API."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def unary(self, method: str, request: Message, seconds: float | None) -> Any:
        """Returns the response of a call.

        Raises:
            KvRouterError: the call failed.
        """
        return await getattr(self._frontend, _NAMES[method])(request, deadline=_deadline(seconds))

    async def stream(self, method: str, request: Message, seconds: float | None) -> AsyncGenerator[Any, None]:
        """Yields the responses of a call, which ends when the generator is closed.

        Raises:
            KvRouterError: the call failed.
        """
        async with aclosing(getattr(self._frontend, _NAMES[method])(request, deadline=_deadline(seconds))) as pieces:
            async for piece in pieces:
                yield piece


def _deadline(seconds: float | None) -> Deadline:
    return Deadline.never() if seconds is None else Deadline.after(seconds)
