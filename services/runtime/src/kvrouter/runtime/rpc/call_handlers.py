"""Serves the unary methods of an object on call streams, as over ordinary RPCs."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import structlog
from google.protobuf.message import Message
from kvrouter.net.calls import CallRefused, ServerCall
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import INTERNAL_ERROR, KvRouterError

log = structlog.get_logger(component="rpc")


def call_handler(
    path: str, bound: Callable[..., Any], parse: Callable[[bytes], Message | KvRouterError]
) -> Callable[[bytes, ServerCall], Coroutine[Any, Any, bytes]]:
    """Returns the handler of a method for ``CallStreamServer.add_unary``.

    Args:
        path: The method's path on the wire, for logs.
        bound: The method of the object.
        parse: Parses a request.
    """

    def handle(encoded: bytes, call: ServerCall) -> Coroutine[Any, Any, bytes]:
        request = parse(encoded)
        if isinstance(request, KvRouterError):
            raise _refusal(request)
        deadline = Deadline.never() if call.time_left is None else Deadline.after(call.time_left)
        return answer(request, deadline)

    async def answer(request: Message, deadline: Deadline) -> bytes:
        try:
            response: Message | bytes = await bound(request, deadline=deadline)
        except KvRouterError as error:
            log.debug("call.refused", method=path, code=error.code.name, cause=str(error))
            raise _refusal(error) from None
        except Exception:
            log.exception("call.failed", method=path)
            raise _refusal(INTERNAL_ERROR) from None
        return response if isinstance(response, bytes) else response.SerializeToString()

    return handle


def _refusal(error: KvRouterError) -> CallRefused:
    return CallRefused(error.code, error.message, error.info)
