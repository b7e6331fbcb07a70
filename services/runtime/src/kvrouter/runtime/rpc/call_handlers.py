"""Serves methods of an object on call streams, as over ordinary RPCs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any

import structlog
from google.protobuf.message import Message
from kvrouter.net import trace_context
from kvrouter.net.calls import ServerCall
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc.guard import UNGUARDED, Guard
from kvrouter.runtime.tracing import Kind, span
from kvrouter.v1.errors import INTERNAL_ERROR, KvRouterError

log = structlog.get_logger(component="rpc")


def call_handler(
    path: str,
    bound: Callable[..., Any],
    parse: Callable[[bytes], Message],
    guard: Guard | None = None,
) -> Callable[[bytes, ServerCall], bytes | Coroutine[Any, Any, bytes]]:
    """Returns the handler of a method for ``CallStreamServer.add_unary``. A plain function is answered in one step.

    Args:
        path: The method's path on the wire, for logs.
        bound: The method of the object.
        parse: Parses a request.
        guard: Decides whether a call may run; None for always.
    """
    waits = inspect.iscoroutinefunction(bound)
    takes_connection = "connection" in inspect.signature(bound).parameters

    def handle(encoded: bytes, call: ServerCall) -> bytes | Coroutine[Any, Any, bytes]:
        try:
            admitted = UNGUARDED if guard is None else guard.admit(path, call.stream.metadata, len(encoded))
        except KvRouterError as error:
            raise refused(error) from None
        deadline = Deadline.never() if call.time_left is None else Deadline.after(call.time_left)
        if waits:
            return answer(encoded, deadline, admitted, trace_context.checked(call.trace_context))
        context = {"connection": call.stream} if takes_connection else {}
        try:
            with admitted:
                return _encoded(bound(parse(encoded), deadline=deadline, **context))
        except Exception as error:
            raise refused(error) from None

    async def answer(
        encoded: bytes, deadline: Deadline, admitted: AbstractContextManager[None], traceparent: str
    ) -> bytes:
        try:
            with admitted, trace_context.entered(traceparent), span(path[1:], Kind.SERVER):
                return _encoded(await bound(parse(encoded), deadline=deadline))
        except Exception as error:
            raise refused(error) from None

    def refused(error: Exception) -> KvRouterError:
        if isinstance(error, KvRouterError):
            log.debug("call.refused", method=path, code=error.code.name, cause=error.message)
            return error.untraced()
        log.error("call.failed", method=path, exc_info=error)
        return INTERNAL_ERROR.untraced()

    return handle


def _encoded(response: Message | bytes) -> bytes:
    return response if isinstance(response, bytes) else response.SerializeToString()
