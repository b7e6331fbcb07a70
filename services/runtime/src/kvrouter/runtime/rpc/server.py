"""Serves objects of a contract over gRPC.

A ``kvrouter.v1.errors`` exception becomes its status code with typed details. Any other becomes INTERNAL, with the
traceback only in the log. The client's deadline is passed to the method. If the client cancels, disconnects or times
out, the method is cancelled and its async generator closed.
"""

from __future__ import annotations

import asyncio
import inspect
import ipaddress
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import replace
from inspect import isawaitable
from typing import Any, TypeVar

import grpc
import structlog
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from kvrouter.net import trace_context
from kvrouter.net.auth import CallerCheck
from kvrouter.net.calls import CallStreamCounts, ServerCall
from kvrouter.net.http2 import ReceivedCall
from kvrouter.net.rpc.server import GrpcServer, received_trace_context
from kvrouter.net.tls import Tls
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc.guard import UNGUARDED, Guard, GuardedPeers
from kvrouter.runtime.rpc.methods import full_path, methods_by_python_name, request_parser
from kvrouter.runtime.telemetry.health import HealthBoard
from kvrouter.runtime.tracing import STARTS_TRACES, Kind, is_recording, request_span, span
from kvrouter.v1.error_encoding import set_error
from kvrouter.v1.errors import INTERNAL_ERROR, DeadlineExceeded, Draining, KvRouterError
from kvrouter.v1.message_limits import DEFAULT_LIMITS, MessageLimits

log = structlog.get_logger(component="rpc")

_UNARY_DEFAULT_SECONDS = 30.0
"""Deadline of unary calls whose client sets none."""
_LAST_WORDS_SECONDS = 0.5
"""Time for the responses of refused calls to reach their clients before connections are closed."""

_ALONE = trace_context.Companions()

_Method = TypeVar("_Method", bound=Callable[..., Any])


def not_awaited_by_drain(method: _Method) -> _Method:
    """Marks a method whose calls last until their client ends them. ``RpcServer.drain`` cuts them off in the end."""
    method.__dict__["not_awaited_by_drain"] = True
    return method


def may_wait(method: _Method) -> _Method:
    """Marks a plain method that returns an awaitable when it cannot answer at once."""
    method.__dict__["may_wait"] = True
    return method


class RpcServer:
    """A gRPC server with health and reflection. Add services, start it, and in the end drain it."""

    def __init__(
        self,
        bind: str,
        *,
        call_stream_counts: CallStreamCounts | None = None,
        reuse_port: bool = False,
        tls: Tls | None = None,
        callers: CallerCheck | None = None,
    ) -> None:
        self._peers = GuardedPeers(callers)
        self.grpc = GrpcServer(self._peers, tls=tls, call_stream_counts=call_stream_counts, reuse_port=reuse_port)
        """Serves the calls."""
        self._encrypted = tls is not None
        self.health = HealthBoard(self.grpc.health)
        """Readiness of the services; each starts as not ready."""
        self._bind = bind
        self._draining = False
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.port = 0
        """The port the server listens on, once started."""
        self._host = bind.rpartition(":")[0]
        """Host under which others reach the server by default."""

    @property
    def calls(self) -> int:
        """Number of running calls, without health and reflection."""
        return self._calls + self.grpc.call_streams.running

    def endpoint(self, advertise: str = "") -> str:
        """Returns the address under which others reach the server, host:port, once started.

        Args:
            advertise: Host, or host:port, to advertise; by default the bound host, or this machine's name if the
                server listens on all addresses.
        """
        host, _, port = advertise.rpartition(":") if ":" in advertise.rsplit("]", 1)[-1] else (advertise, "", "")
        return f"{host or self._host}:{port or self.port}"

    async def start(self) -> None:
        """Starts to listen.

        Raises:
            BindFailed: the port is in use or the address is not one of this machine's.
            InvalidTls: TLS is enabled without a certificate.
        """
        self.health.announce(self.grpc.services)
        self.port = await self.grpc.start(self._bind)
        if _is_any(self._host):
            # In a thread, because a name server may be slow or away.
            self._host = await asyncio.to_thread(socket.getfqdn)
        services = self.grpc.services
        log.info("grpc.listening", address=self.endpoint(), services=services, encrypted=self._encrypted)

    async def drain(self, seconds: float) -> None:
        """Stops: refuses new calls, lets running calls finish, then closes connections.

        Args:
            seconds: Maximum time to wait for calls; longer ones are cancelled.
        """
        self._draining = True
        self.health.drain()
        try:
            async with asyncio.timeout(seconds):
                await self.grpc.call_streams.drain()
                await self._idle.wait()
        except TimeoutError:
            log.warning("calls.cut_off", calls=self.calls, after_seconds=seconds)
        finally:
            await self.grpc.stop(_LAST_WORDS_SECONDS)

    def add_service(
        self,
        descriptor: ServiceDescriptor,
        implementation: object,
        *,
        limits: MessageLimits = DEFAULT_LIMITS,
        guard: Guard | None = None,
    ) -> None:
        """Serves an object under the service's name. Methods it lacks return UNIMPLEMENTED.

        Its unary methods are served on call streams as well.

        Args:
            descriptor: The service.
            implementation: The object.
            limits: Size limits of a request. In request streams, elements are not counted: an oversized request must
                not end the other calls on the stream, so the object refuses it.
            guard: Decides which calls may run; None for all.
        """
        if guard is not None:
            self._peers.add(descriptor.full_name, guard)
        handlers = {}
        for name, method in methods_by_python_name(descriptor).items():
            bound = _bound_method(implementation, name)
            if bound is None:
                continue
            handlers[method.name] = self._handler(method, bound, limits, guard)
            self._add_to_call_streams(method, bound, limits, guard)
        self.grpc.add(descriptor.full_name, handlers)

    def _add_to_call_streams(
        self, method: MethodDescriptor, bound: Callable[..., Any], limits: MessageLimits, guard: Guard | None
    ) -> None:
        if not method.client_streaming and not method.server_streaming:
            path = full_path(method)
            self.grpc.call_streams.add_unary(path[1:], call_handler(path, bound, request_parser(method, limits), guard))

    def _handler(
        self, method: MethodDescriptor, bound: Callable[..., Any], limits: MessageLimits, guard: Guard | None
    ) -> grpc.RpcMethodHandler[Any, Any]:
        make, answer = {
            (False, False): (grpc.unary_unary_rpc_method_handler, _answer_once),
            (False, True): (grpc.unary_stream_rpc_method_handler, _answer_in_pieces),
            (True, False): (grpc.stream_unary_rpc_method_handler, _answer_once),
        }[method.client_streaming, method.server_streaming]
        if method.client_streaming:
            limits = replace(limits, elements=None)
        path = full_path(method)
        awaited = not getattr(bound, "not_awaited_by_drain", False)
        starts_traces = method.full_name in STARTS_TRACES
        parse = request_parser(method, limits)

        async def handle(incoming: Any, context: ReceivedCall) -> Any:
            # An exception stored in this frame would keep the frame and the request alive until the cyclic garbage
            # collector runs. ``context.abort`` stores one as well, so the status is set instead.
            try:
                with (
                    self._counted(awaited=awaited),
                    _admitted(guard, path, context, 0 if method.client_streaming else len(incoming)),
                    trace_context.accompanied(_companions_of(context) if starts_traces else _ALONE),
                    trace_context.entered(received_trace_context(context)),
                    request_span(path[1:]) if starts_traces else span(path[1:], Kind.SERVER),
                ):
                    request = _read_all(incoming, parse) if method.client_streaming else parse(incoming)
                    return await answer(bound, request, context)
            except KvRouterError as error:
                log.debug("call.refused", method=path, code=error.code.name, cause=error.message)
                set_error(context, error)
            except Exception:
                log.exception("call.failed", method=path)
                set_error(context, INTERNAL_ERROR)
            return None  # gRPC sends no response with a status other than OK.

        # Without a deserializer, so that a request is parsed only when it is admitted.
        return make(handle, response_serializer=_serialize)

    @contextmanager
    def _counted(self, *, awaited: bool) -> Iterator[None]:
        if self._draining:
            raise Draining
        if not awaited:
            yield
            return
        self._calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()


def _admitted(guard: Guard | None, path: str, context: ReceivedCall, size: int) -> AbstractContextManager[None]:
    return UNGUARDED if guard is None else guard.admit(path, context.invocation_metadata(), size)


async def _answer_once(bound: Callable[..., Any], request: Any, context: ReceivedCall) -> Any:
    deadline = _deadline_of(context)
    if isinstance(request, Message):
        deadline = deadline.or_after(_UNARY_DEFAULT_SECONDS)
    limit = asyncio.timeout(deadline.remaining())
    try:
        async with limit:
            response = bound(request, deadline=deadline)
            return await response if isawaitable(response) else response
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded from None


async def _answer_in_pieces(bound: Callable[..., Any], request: Any, context: ReceivedCall) -> None:
    async with aclosing(bound(request, deadline=_deadline_of(context))) as responses:
        async for response in responses:
            await context.write(response)


def _bound_method(implementation: object, name: str) -> Callable[..., Any] | None:
    return getattr(implementation, f"{name}_encoded", None) or getattr(implementation, name, None)


def _deadline_of(context: ReceivedCall) -> Deadline:
    remaining = context.time_remaining()
    return Deadline.never() if remaining is None else Deadline.after(remaining)


def _companions_of(context: ReceivedCall) -> trace_context.Companions:
    """Returns the companions of the client's trace context."""
    received: dict[str, list[str]] = {trace_context.STATE_HEADER: [], trace_context.BAGGAGE_HEADER: []}
    for key, value in context.invocation_metadata():
        if key in received and isinstance(value, str):
            received[key].append(value)
    tracestate, baggage = received.values()
    if not (tracestate or baggage):
        return _ALONE
    return trace_context.checked_companions(received_trace_context(context), tracestate, baggage)


async def _read_all(incoming: AsyncIterator[bytes], parse: Callable[[bytes], Message]) -> AsyncGenerator[Message, None]:
    async for each in incoming:
        yield parse(each)


def _serialize(response: Message | bytes) -> bytes:
    return response if isinstance(response, bytes) else response.SerializeToString()


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return host in {"", "*"}


def call_handler(
    path: str,
    bound: Callable[..., Any],
    parse: Callable[[bytes], Message],
    guard: Guard | None = None,
) -> Callable[[bytes, ServerCall], bytes | Coroutine[Any, Any, bytes]]:
    """Returns the handler of a method for ``CallStreamServer.add_unary``. A plain function is answered in one step.

    Otherwise the handler returns a coroutine, which needs a task of its own, since it sets the task's trace context. So
    it does for a method that ``may_wait`` if a guard or a span lasts as long as the call.

    Args:
        path: The method's path on the wire, for logs.
        bound: The method of the object.
        parse: Parses a request.
        guard: Decides whether a call may run; None for always.
    """
    waits = inspect.iscoroutinefunction(bound)
    may_be_late = getattr(bound, "may_wait", False)
    takes_connection = "connection" in inspect.signature(bound).parameters

    def handle(encoded: bytes, call: ServerCall) -> bytes | Coroutine[Any, Any, bytes]:
        try:
            admitted = UNGUARDED if guard is None else guard.admit(path, call.stream.metadata, len(encoded))
        except KvRouterError as error:
            raise refused(error) from None
        deadline = Deadline.never() if call.time_left is None else Deadline.after(call.time_left)
        if waits or (may_be_late and (guard is not None or (call.trace_context and is_recording()))):
            return answer(encoded, deadline, admitted, trace_context.checked(call.trace_context))
        context = {"connection": call.stream} if takes_connection else {}
        try:
            with admitted:
                response = bound(parse(encoded), deadline=deadline, **context)
        except Exception as error:
            raise refused(error) from None
        if may_be_late and isawaitable(response):
            return late(response, trace_context.checked(call.trace_context))
        return _serialize(response)

    async def late(response: Awaitable[Any], traceparent: str) -> bytes:
        trace_context.enter(traceparent)
        try:
            return _serialize(await response)
        except Exception as error:
            raise refused(error) from None

    async def answer(
        encoded: bytes, deadline: Deadline, admitted: AbstractContextManager[None], traceparent: str
    ) -> bytes:
        trace_context.enter(traceparent)
        try:
            with admitted, span(path[1:], Kind.SERVER):
                response = bound(parse(encoded), deadline=deadline)
                return _serialize(await response if isawaitable(response) else response)
        except Exception as error:
            raise refused(error) from None

    def refused(error: Exception) -> KvRouterError:
        if isinstance(error, KvRouterError):
            log.debug("call.refused", method=path, code=error.code.name, cause=error.message)
            return error.untraced()
        log.error("call.failed", method=path, exc_info=error)
        return INTERNAL_ERROR.untraced()

    return handle
