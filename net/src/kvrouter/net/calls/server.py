"""Serves call streams on a gRPC server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

import grpc.aio
from kvrouter.net.calls.counts import CallStreamCounts
from kvrouter.net.calls.errors import CallRefused, ProtocolViolation
from kvrouter.net.calls.limits import CallLimits
from kvrouter.net.calls.parsing import parse
from kvrouter.net.calls.server_call import Method, ServerCall, StreamingHandler, UnaryHandler
from kvrouter.net.calls.server_stream import ServerStream
from kvrouter.net.grpc_status import set_error
from kvrouter.net.logs import get_logger
from kvrouter.v1 import calls_pb2
from kvrouter.v1.calls_pb2 import OpenCallStreamRequest
from kvrouter.v1.errors_pb2 import ErrorInfo, ErrorReason

log = get_logger(__name__)

SERVICE = calls_pb2.DESCRIPTOR.services_by_name["CallStreamService"].full_name
"""Full name of the service, for reflection."""

_OPENING_SECONDS = 10.0
"""Time that a client has to send its hello, seconds."""
_TICK_SECONDS = 1.0
_SILENT_TICKS = 10
"""Consecutive ticks without a message after which a client that sends pings is gone."""
_LAST_WRITE_SECONDS = 1.0
"""Time for a write to finish before the stream ends with a status, seconds. gRPC cannot send one during the first
write; a later write that takes so long is cancelled."""
_UNARY_DEFAULT_SECONDS = 30.0
"""Time limit of unary calls whose client sets none, seconds, as over an ordinary RPC."""

_Context = grpc.aio.ServicerContext[Any, Any]


class StreamCheck(Protocol):
    """Decides which methods may be called on a stream that a client opens."""

    def refusals(self, context: _Context) -> Callable[[str], Callable[[], CallRefused] | None]:
        """Returns what tells for a method how its calls are refused; None if they are not."""
        ...


class CallStreamServer:
    """Runs the calls of all streams that clients open. Add methods, then register it with a gRPC server."""

    def __init__(
        self,
        *,
        limits: CallLimits | None = None,
        counts: CallStreamCounts | None = None,
        check: StreamCheck | None = None,
    ) -> None:
        """``check`` decides which methods a client may call; None permits all."""
        self._check = check
        self.counts = CallStreamCounts() if counts is None else counts
        self._limits = CallLimits() if limits is None else limits
        self._methods: list[Method] = []
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        self._changed = asyncio.Event()

    @property
    def running(self) -> int:
        """Number of calls that run."""
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

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a gRPC server that is not started yet."""
        handlers: dict[str, Any] = {"OpenCallStream": grpc.stream_stream_rpc_method_handler(self._serve)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def drain(self) -> None:
        """Announces that no further calls are run, and returns when the running ones are answered."""
        self._draining = True
        for connection in self._connections:
            connection.stream.drain()
        while self._connections or self._tasks:
            self._changed.clear()
            await self._changed.wait()

    async def _serve(self, _requests: object, context: _Context) -> None:
        try:
            methods = self._methods_for(context)
        except CallRefused as refused:
            set_error(context, refused.code, str(refused), refused.info)
            return
        try:
            async with asyncio.timeout(_OPENING_SECONDS):
                first = await context.read()
        except TimeoutError:
            _refuse(context, ProtocolViolation("hello", "expected a hello in time, received nothing"))
            return
        if first is grpc.aio.EOF:
            return
        try:
            connection = _Connection(first, methods, self._limits, self.counts, context, self._run)
        except ProtocolViolation as violation:
            self.counts.ended[violation.reason] += 1
            _refuse(context, violation)
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

    def _methods_for(self, context: _Context) -> Sequence[Method]:
        """Returns the methods for a client, of which those that it may not call refuse its calls.

        Raises:
            CallRefused: it may call none of them.
        """
        if self._check is None:
            return self._methods
        refusals = self._check.refusals(context)
        refused = [refusals(method.name) for method in self._methods]
        if refused and refused[0] is not None and all(refused):
            raise refused[0]()
        return [
            method if refuse is None else Method(method.name, unary=_refusing(refuse))
            for method, refuse in zip(self._methods, refused, strict=True)
        ]

    def _run(self, call: ServerCall, answer: Awaitable[bytes]) -> None:
        seconds = _UNARY_DEFAULT_SECONDS if call.time_left is None else call.time_left
        self.run(call, _answer(call, answer), seconds)

    def run(self, call: ServerCall, coroutine: Coroutine[Any, Any, None], seconds: float | None) -> None:
        """Runs what answers a call in a task, which is cancelled when the call is cancelled or ``seconds`` are over."""
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
                call.fail(CallRefused(grpc.StatusCode.CANCELLED, "the call was cancelled at the server"))
            if self._draining:
                self._changed.set()

        task.add_done_callback(done)


class _Connection:
    """The I/O of one stream."""

    def __init__(
        self,
        first: bytes,
        methods: Sequence[Method],
        limits: CallLimits,
        counts: CallStreamCounts,
        context: _Context,
        run: Callable[[ServerCall, Awaitable[bytes]], None],
    ) -> None:
        """``first`` is the client's first message, and ``run`` runs the awaitable of a call.

        Raises:
            ProtocolViolation: the first message opens no stream.
        """
        self._context = context
        self._counts = counts
        self._wakeup = asyncio.Event()
        self._ended: asyncio.Future[ProtocolViolation | str] = asyncio.get_running_loop().create_future()
        """Why the stream ends."""
        self._half_closed = False
        self._stopping = False
        self.stream = ServerStream(
            parse(OpenCallStreamRequest, first, limits), methods, limits, counts, self._wakeup.set, run
        )
        self.stream.metadata = tuple(context.invocation_metadata() or ())
        self.stream.on_overflow = self._overflow

    async def serve(self) -> None:
        """Serves the stream until it ends."""
        counts = self._counts
        counts.opened += 1
        counts.streams += 1
        log.info("call_stream.opened", client=self.stream.client_name)
        writing = asyncio.create_task(self._write(), name="call-stream-write")
        tasks = [
            writing,
            asyncio.create_task(self._read(), name="call-stream-read"),
            asyncio.create_task(self._end_when_silent(), name="call-stream-silence"),
        ]
        reason = "lost"
        try:
            ended = await self._ended
            self.stream.lose()
            self._stopping = True
            self._wakeup.set()
            await asyncio.wait([writing], timeout=_LAST_WRITE_SECONDS)
            if isinstance(ended, ProtocolViolation):
                reason = ended.reason
                _refuse(self._context, ended)
            else:
                reason = ended
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self.stream.lose()
            counts.streams -= 1
            counts.ended[reason] += 1
            log.info("call_stream.ended", client=self.stream.client_name, reason=reason)

    def _end(self, why: ProtocolViolation | str) -> None:
        if not self._ended.done():
            self._ended.set_result(why)

    def _overflow(self) -> None:
        self._end(
            ProtocolViolation("unread", "the client reads its responses too slowly", grpc.StatusCode.RESOURCE_EXHAUSTED)
        )

    async def _read(self) -> None:
        context, stream = self._context, self.stream
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                stream.receive(message)
        except ProtocolViolation as violation:
            self._end(violation)
            return
        except grpc.aio.BaseError:
            self._end("lost")
            return
        # The client sends nothing more, but reads the answers to what it has sent.
        self._half_closed = True
        stream.drain()
        self._wakeup.set()

    async def _write(self) -> None:
        context, stream, wakeup = self._context, self.stream, self._wakeup
        while not self._stopping:
            await wakeup.wait()
            wakeup.clear()
            while not self._stopping and (message := stream.next_message()) is not None:
                await context.write(message)
            if stream.drained:
                self._end("closed" if self._half_closed else "draining")

    async def _end_when_silent(self) -> None:
        """Ends the stream of a client that sent pings and stopped.

        Ticks of this loop are counted, not seconds, so that a server that was frozen itself does not take its clients
        for gone.
        """
        silent = 0
        while silent < _SILENT_TICKS:
            await asyncio.sleep(_TICK_SECONDS)
            silent = silent + 1 if self.stream.sends_pings and not self.stream.heard else 0
            self.stream.heard = False
        self._end(ProtocolViolation("silent", f"no message for {_SILENT_TICKS} s", grpc.StatusCode.DEADLINE_EXCEEDED))


async def _answer(call: ServerCall, answer: Awaitable[bytes]) -> None:
    try:
        call.end(await answer)
    except CallRefused as refused:
        call.fail(refused)
    except Exception:
        log.exception("call.failed", call=call.number)
        call.fail(CallRefused(grpc.StatusCode.INTERNAL, "the call failed; the server's log has the cause"))


def _refusing(refuse: Callable[[], CallRefused]) -> UnaryHandler:
    def handle(_request: bytes, _call: ServerCall) -> bytes:
        raise refuse()

    return handle


def _cancel(task: asyncio.Task[None]) -> None:
    # After the task's first step: one that is cancelled before it leaves the handler's coroutine unawaited, and Python
    # says so in the log.
    task.get_loop().call_soon(task.cancel)


def _time_out(call: ServerCall) -> None:
    call.fail(
        CallRefused(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "the deadline has passed",
            ErrorInfo(reason=ErrorReason.ERROR_REASON_DEADLINE, advice="Set a longer deadline."),
        )
    )
    call.cancelled()


def _refuse(context: _Context, violation: ProtocolViolation) -> None:
    log.warning("call_stream.refused", peer=context.peer(), reason=violation.reason, cause=str(violation))
    info = ErrorInfo(reason=ErrorReason.ERROR_REASON_BAD_REQUEST, advice="Follow the rules of kvrouter/v1/calls.proto.")
    set_error(context, violation.code, str(violation), info)
