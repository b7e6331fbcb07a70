"""Serves methods of an object on call streams, as over ordinary RPCs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import structlog
from google.protobuf.message import Message
from kvrouter.net.calls import CallRefused, CallStreamServer, ServerCall
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import INTERNAL_ERROR, KvRouterError, TooLarge
from kvrouter.runtime.rpc.drainable_session import DrainableSession

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


_MAX_WAITING = 65_536
"""Requests of one call that may wait for its handler; with one more the call is refused."""


def session_handler(
    path: str,
    bound: Callable[..., Any],
    parse: Callable[[bytes], Message | KvRouterError],
    server: CallStreamServer,
    sessions: set[DrainableSession],
) -> Callable[[bytes, ServerCall], None]:
    """Returns the handler of a bidirectional method for ``CallStreamServer.add_streaming``.

    Args:
        path: The method's path on the wire, for logs.
        bound: The method of the object.
        parse: Parses a request.
        server: Runs the call.
        sessions: Where running calls are kept, to be ended when the server drains.
    """

    def handle(encoded: bytes, call: ServerCall) -> None:
        waiting: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_WAITING)
        waiting.put_nowait(encoded)

        def take(request: bytes | None) -> None:
            try:
                waiting.put_nowait(request)
            except asyncio.QueueFull:
                call.fail(_refusal(TooLarge(f"{_MAX_WAITING} requests of the call wait already")))
                call.cancelled()

        call.on_request = take
        server.run(call, serve(waiting, call), call.time_left)

    async def requests(waiting: asyncio.Queue[bytes | None]) -> AsyncGenerator[Message, None]:
        while (encoded := await waiting.get()) is not None:
            request = parse(encoded)
            if isinstance(request, KvRouterError):
                raise request.untraced()
            yield request

    async def serve(waiting: asyncio.Queue[bytes | None], call: ServerCall) -> None:
        session = DrainableSession()
        sessions.add(session)
        deadline = Deadline.never() if call.time_left is None else Deadline.after(call.time_left)
        try:
            async with session.limited(), aclosing(bound(requests(waiting), deadline=deadline)) as responses:
                while (response := await session.next_of(responses)) is not None:
                    call.respond(response.SerializeToString())
            call.end()
        except KvRouterError as error:
            log.debug("call.refused", method=path, code=error.code.name, cause=str(error))
            call.fail(_refusal(error))
        except Exception:
            log.exception("call.failed", method=path)
            call.fail(_refusal(INTERNAL_ERROR))
        finally:
            sessions.discard(session)

    return handle


def _refusal(error: KvRouterError) -> CallRefused:
    return CallRefused(error.code, error.message, error.info)
