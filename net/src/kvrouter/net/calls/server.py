"""Serves call streams on a gRPC server."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from functools import cached_property
from typing import Any

import grpc.aio
from kvrouter.net.calls.errors import ProtocolViolation
from kvrouter.net.calls.limits import CallLimits, CallStreamCounts
from kvrouter.net.calls.server_call import Method, Peer, PeerCheck, ServerCall, StreamingHandler, UnaryHandler
from kvrouter.net.calls.server_connection import StreamConnection, refuse
from kvrouter.net.http2 import ReceivedCall
from kvrouter.net.http2.received_calls import ReceivedCalls
from kvrouter.net.logs import get_logger
from kvrouter.v1 import calls_pb2
from kvrouter.v1.error_encoding import set_error
from kvrouter.v1.errors import DeadlineExceeded, Internal, KvRouterError, TooLarge

log = get_logger(__name__)

SERVICE = calls_pb2.DESCRIPTOR.services_by_name["CallStreamService"].full_name
"""Full name of the service, for reflection."""

_OPENING_SECONDS = 10.0
"""Time a client has to send its hello, seconds."""
_UNARY_DEFAULT_SECONDS = 30.0
"""Time limit of unary calls whose client sets none, seconds, as over an ordinary RPC."""


class CallStreamServer:
    """Runs the calls of all clients' streams. Add methods, then its handlers to a gRPC server."""

    def __init__(
        self,
        *,
        limits: CallLimits | None = None,
        counts: CallStreamCounts | None = None,
        check: PeerCheck | None = None,
    ) -> None:
        """``check`` decides which methods a client may call; None permits all."""
        self._check = check
        self.counts = CallStreamCounts() if counts is None else counts
        self.limits = CallLimits() if limits is None else limits
        self._methods: list[Method] = []
        self._connections: set[StreamConnection] = set()
        self._streams: Counter[ReceivedCalls] = Counter()
        """Number of streams by connection."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_opening: Callable[[ReceivedCall, bool], None] = lambda _stream, _admitted: None
        """Called with a new stream, and whether it is admitted."""
        self._draining = False
        self._changed = asyncio.Event()

    @property
    def running(self) -> int:
        """Number of running calls."""
        return sum(connection.stream.running for connection in self._connections)

    def add_unary(self, method: str, handler: UnaryHandler) -> None:
        """Serves a unary method.

        Args:
            method: Full name, such as kvrouter.v1.IndexerService/FindMatches.
            handler: Returns the encoded response, or an awaitable of it, which runs in a task.
        """
        self._methods.append(Method(method, unary=handler))

    def add_streaming(self, method: str, handler: StreamingHandler) -> None:
        """Serves a server-streaming method. The handler starts the call and returns at once."""
        self._methods.append(Method(method, streaming=handler))

    def handlers(self) -> dict[str, Any]:
        """Returns the handlers of the service's methods, for a gRPC server."""
        return {"OpenCallStream": grpc.stream_stream_rpc_method_handler(self._serve)}

    async def drain(self) -> None:
        """Announces the end of new calls, and returns when the running ones are answered."""
        self._draining = True
        for connection in self._connections:
            connection.stream.drain()
        while self._connections or self._tasks:
            self._changed.clear()
            await self._changed.wait()

    async def _serve(self, _requests: object, context: ReceivedCall) -> None:
        connection = context.connection
        try:
            peer = None if self._check is None else self._check.peer(context)
            if peer is not None:
                peer.open_stream(self._names)
            self._make_room(connection)
        except KvRouterError as refused:
            self.on_opening(context, False)
            set_error(context, refused)
            return
        self.on_opening(context, True)
        self._streams[connection] += 1
        try:
            await self._serve_admitted(context, peer)
        finally:
            self._streams[connection] -= 1
            if not self._streams[connection]:
                del self._streams[connection]

    async def _serve_admitted(self, context: ReceivedCall, peer: Peer | None) -> None:
        try:
            async with asyncio.timeout(_OPENING_SECONDS):
                first = await context.read()
        except TimeoutError:
            refuse(context, ProtocolViolation("hello", "expected a hello in time, received nothing"))
            return
        if first is grpc.aio.EOF:
            return
        try:
            connection = StreamConnection(first, self._methods, self.limits, self.counts, context, peer, self._run)
        except ProtocolViolation as violation:
            self.counts.ended[violation.reason] += 1
            refuse(context, violation)
            return
        del first
        self._connections.add(connection)
        if self._draining:
            connection.stream.drain()
        try:
            await connection.serve()
        finally:
            self._connections.discard(connection)
            self._changed.set()

    def _make_room(self, connection: ReceivedCalls) -> None:
        """Makes room for a further stream.

        Raises:
            KvRouterError: there is none.
        """
        limits = self.limits
        if self._streams[connection] >= limits.connection_streams:
            raise TooLarge(f"the connection has its {limits.connection_streams} call streams already")
        if self._streams.total() < limits.server_streams:
            return
        idle = (connection for connection in self._connections if connection.idle_ticks)
        longest = max(idle, key=lambda connection: connection.idle_ticks, default=None)
        if longest is None:
            raise TooLarge(f"the server has its {limits.server_streams} call streams already")
        longest.end("replaced")

    @cached_property
    def _names(self) -> list[str]:
        return [method.name for method in self._methods]

    def _run(self, call: ServerCall, answer: Awaitable[bytes]) -> None:
        seconds = _UNARY_DEFAULT_SECONDS if call.time_left is None else call.time_left
        self.run(call, _answer(call, answer), seconds)

    def run(self, call: ServerCall, coroutine: Coroutine[Any, Any, None], seconds: float | None) -> None:
        """Runs the answer of a call in a task, cancelled with the call or when ``seconds`` are over."""
        loop = asyncio.get_running_loop()
        if sys.version_info >= (3, 12):
            task = asyncio.Task(coroutine, loop=loop, eager_start=True)
        else:
            task = asyncio.Task(coroutine, loop=loop)
        if task.done():
            return
        self._tasks.add(task)
        call.on_cancelled = lambda: _cancel(task)
        timer = None if seconds is None else loop.call_later(seconds, _time_out, call)

        def done(_task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if timer is not None:
                timer.cancel()
            if not call.ended:
                # Cancelled by the handler's own code.
                call.fail(KvRouterError("the call was cancelled at the server", code=grpc.StatusCode.CANCELLED))
            if self._draining:
                self._changed.set()

        task.add_done_callback(done)


async def _answer(call: ServerCall, answer: Awaitable[bytes]) -> None:
    try:
        call.end(await answer)
    except KvRouterError as refused:
        call.fail(refused)
    except Exception:
        log.exception("call.failed", call=call.number)
        call.fail(Internal("the call failed; the server's log has the cause"))


def _cancel(task: asyncio.Task[None]) -> None:
    # After the task's first step: one that is cancelled before it leaves the handler's coroutine unawaited, and Python
    # says so in the log.
    task.get_loop().call_soon(task.cancel)


def _time_out(call: ServerCall) -> None:
    call.fail(DeadlineExceeded())
    call.cancelled()
