"""Stubs that behave like the object they represent, over gRPC or on a call stream.

Deadlines become timeouts, failures are raised as the typed errors of the service, and closing a stream early cancels
its call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from kvrouter.net import tls as transport_security, trace_context
from kvrouter.net.auth import HEADER, ServiceToken, shown_token
from kvrouter.net.calls import CallStreamClient, CallStreamCounts
from kvrouter.net.http2 import ConnectionLost, Http2Violation, Metadata
from kvrouter.net.http2.metadata import from_base64
from kvrouter.net.http2.options import CHANNEL_OPTIONS, MAX_MESSAGE_BYTES
from kvrouter.net.http2.responses import CallFailed, ResponseConnection, Responses
from kvrouter.net.http2.side import MessageTooLong
from kvrouter.net.tls import Tls
from kvrouter.net.tls.channel import OuterChannel
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc.methods import full_path, methods_by_python_name
from kvrouter.v1.error_encoding import STATUS_KEY, from_rpc_error
from kvrouter.v1.errors import DeadlineExceeded, DependencyAway, Internal, KvRouterError, TooLarge

_SHOW_TOKEN = frozenset({"scheduler", "indexer", "worker"})
"""Roles of servers with a service token."""


def open_channel(
    target: str,
    *,
    tls: Tls | None = None,
    role: str = "",
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    api_key: str = "",
) -> grpc.aio.Channel:
    """Returns a channel to ``host:port``, which connects at its first use and reconnects when the peer returns.

    Args:
        target: The address.
        tls: Encrypts the channel and checks the peer's certificate; None for plain text.
        role: Role of the peer (frontend, scheduler, indexer or worker), for the name in its certificate.
        max_message_bytes: Maximum size of a response; a larger one raises ``TooLarge``.
        api_key: API key or token every call shows; empty for none.

    Calls to a scheduler or an indexer also show the service token of this process, if it has one, and calls to a worker
    the token derived from it.
    """
    options = dict(CHANNEL_OPTIONS) | {"grpc.max_receive_message_length": max_message_bytes}
    channel = transport_security.open_channel(target, tuple(options.items()), tls, role)
    token = _token_for(role)
    if token is not None:
        channel = MetadataChannel(channel, lambda: (HEADER, token.shown_to(role)))
    return MetadataChannel(channel, lambda: ("authorization", f"Bearer {api_key}")) if api_key else channel


def call_stream_client(
    target: str,
    *,
    client_name: str,
    tls: Tls | None = None,
    role: str = "",
    counts: CallStreamCounts | None = None,
    ends_when_silent: bool = True,
) -> CallStreamClient:
    """Returns the client of the call stream of ``host:port``, which connects when it runs.

    Args:
        target: The address.
        client_name: Name of this client, for the server's logs.
        tls: Encrypts the connection and checks the server's certificate; None for plain text.
        role: Role of the server (scheduler, indexer or worker), for the name in its certificate.
        counts: Counts for metrics.
        ends_when_silent: Whether a server that answers no heartbeat loses its calls. If not, they wait for it.

    The stream shows the service token of this process, if it has one, to a scheduler or an indexer, and what is derived
    from it to a worker.
    """
    return CallStreamClient(
        target,
        client_name=client_name,
        tls=tls,
        role=role,
        metadata=_token_metadata(role),
        counts=counts,
        ends_when_silent=ends_when_silent,
    )


def _token_metadata(role: str) -> Callable[[], Metadata]:
    """Returns a function that returns what this process's token now shows to a server of a role."""
    token = _token_for(role)
    return lambda: ((HEADER, shown),) if token is not None and (shown := token.shown_to(role)) else ()


def _token_for(role: str) -> ServiceToken | None:
    return shown_token() if role in _SHOW_TOKEN else None


def remote(
    descriptor: ServiceDescriptor, channel: grpc.aio.Channel, *, raw_responses: frozenset[str] = frozenset()
) -> Any:
    """Returns a stub of a service, to be cast to its protocol in ``kvrouter.runtime.contracts``.

    Args:
        descriptor: The service.
        channel: Channel to the service. The caller closes it, or drops it with the stub while no call runs.
        raw_responses: Protobuf names of the methods whose responses are returned as ``bytes`` without parsing.
    """
    methods = methods_by_python_name(descriptor)

    def make(name: str) -> Callable[..., Any] | None:
        method = methods.get(name)
        return None if method is None else _caller(method, channel, raw=method.name in raw_responses)

    return _Stub(make)


class _Stub:
    """Has the methods that ``make`` makes by their names in Python; None for a method it lacks. Makes each once."""

    def __init__(self, make: Callable[[str], Callable[..., Any] | None]) -> None:
        self._make = make

    def __getattr__(self, name: str) -> Any:
        call = self._make(name)
        if call is None:
            raise AttributeError(name)
        setattr(self, name, call)
        return call


def _caller(method: MethodDescriptor, channel: grpc.aio.Channel, *, raw: bool) -> Callable[..., Any]:
    kinds = {
        (False, False): (channel.unary_unary, _unary),
        (False, True): (channel.unary_stream, _server_stream),
        (True, False): (channel.stream_unary, _client_stream),
    }
    multicallable, adapt = kinds[method.client_streaming, method.server_streaming]
    parse = GetMessageClass(method.output_type).FromString
    call = multicallable(
        full_path(method), request_serializer=_serialize, response_deserializer=None if raw else _parser(parse)
    )
    return adapt(call)


def _serialize(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


def _parser(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def checked(encoded: bytes) -> Any:
        # gRPC swallows exceptions of a deserializer, so the error is returned as a value.
        try:
            return parse(encoded)
        except DecodeError:
            return Internal("the service sent a response that cannot be parsed")

    return checked


def _checked(response: Any) -> Any:
    if isinstance(response, KvRouterError):
        raise response.untraced()
    return response


def _translate_cancel(cancelled: asyncio.CancelledError) -> BaseException:
    """Returns the exception to raise for a CancelledError from gRPC.

    gRPC also raises one if the call was cancelled because its channel was closed. Only the caller's own cancellation
    may cancel the caller's task.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        return cancelled
    return DependencyAway("the channel was closed during the call")


def _timeout(deadline: Deadline) -> float | None:
    # gRPC treats a timeout of 0 as none.
    if (remaining := deadline.remaining()) == 0:
        raise DeadlineExceeded
    return remaining


def _metadata() -> tuple[tuple[str, str], ...] | None:
    traceparent = trace_context.current()
    return ((trace_context.HEADER, traceparent),) if traceparent else None


def _unary(multicallable: Any) -> Callable[..., Any]:
    async def call(request: Message, *, deadline: Deadline) -> Any:
        try:
            return _checked(await multicallable(request, timeout=_timeout(deadline), metadata=_metadata()))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        except asyncio.CancelledError as cancelled:
            raise _translate_cancel(cancelled) from None

    return call


def _server_stream(multicallable: Any) -> Callable[..., AsyncGenerator[Any, None]]:
    async def call(request: Message, *, deadline: Deadline) -> AsyncGenerator[Any, None]:
        # gRPC keeps what it is given for as long as the call lasts: the encoding, and not the message as well.
        rpc = multicallable(_serialize(request), timeout=_timeout(deadline), metadata=_metadata())
        del request
        try:
            while (response := await _read(rpc)) is not grpc.aio.EOF:
                yield _checked(response)
        finally:
            rpc.cancel()

    return call


def _client_stream(multicallable: Any) -> Callable[..., Any]:
    async def call(requests: AsyncIterator[Message], *, deadline: Deadline) -> Any:
        rpc = multicallable(timeout=_timeout(deadline), metadata=_metadata())
        sending = asyncio.create_task(_send(requests, rpc), name="rpc-send")
        try:
            return _checked(await rpc)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        except asyncio.CancelledError as cancelled:
            raise _failure_of(sending) or _translate_cancel(cancelled) from None
        finally:
            await _end(rpc, sending)
            del sending  # Its exception's traceback refers to this frame.

    return call


async def _read(rpc: Any) -> Any:
    try:
        return await rpc.read()
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    except asyncio.CancelledError as cancelled:
        raise _translate_cancel(cancelled) from None


async def _send(requests: AsyncIterator[Message], rpc: Any) -> None:
    """Sends all requests, then closes the sending side. An error of the iterator cancels the call."""
    try:
        async for request in requests:
            await rpc.write(request)
        await rpc.done_writing()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return  # The call has ended; the reader receives its status.
    except Exception:
        rpc.cancel()
        raise


def _failure_of(sending: asyncio.Task[None]) -> BaseException | None:
    if not sending.done() or sending.cancelled():
        return None
    return sending.exception()


async def _end(rpc: Any, sending: asyncio.Task[None]) -> None:
    rpc.cancel()
    sending.cancel()
    await asyncio.wait([sending])
    _failure_of(sending)  # Retrieves the exception, so that asyncio does not report it.


class MetadataChannel(OuterChannel):
    """Adds an entry to the metadata of every call of another channel, which it closes with itself."""

    def __init__(self, channel: grpc.aio.Channel, entry: Callable[[], tuple[str, str]]) -> None:
        """``entry`` returns the entry for a call; one without a value is left out."""
        self._channel = channel
        self._entry = entry

    def inner(self) -> grpc.aio.Channel:
        """Returns the other channel."""
        return self._channel

    def method(self, make: Callable[[grpc.aio.Channel], Any]) -> Any:
        """Returns a method of the other channel that adds the entry."""
        inner = make(self._channel)

        def call(*arguments: Any, metadata: Any = None, **named: Any) -> Any:
            entry = self._entry()
            return inner(*arguments, metadata=(*(metadata or ()), *([entry] if entry[1] else ())), **named)

        return call

    async def close(self, grace: float | None = None) -> None:
        """Implements grpc.aio.Channel."""
        await self._channel.close(grace)


def remote_on_call_stream(descriptor: ServiceDescriptor, client: CallStreamClient) -> Any:
    """Returns a stub of a service, to be cast to its protocol in ``kvrouter.runtime.contracts``.

    It has the service's unary methods, and behaves like ``kvrouter.runtime.rpc.remote``. A call not sent, or
    whose outcome is unknown, raises ``DependencyAway``. A method whose name has the suffix ``_encoded`` returns the
    encoded response.
    """
    methods = methods_by_python_name(descriptor)

    def make(name: str) -> Callable[..., Any] | None:
        plain = name.removesuffix("_encoded")
        method = methods.get(plain)
        if method is None or method.client_streaming or method.server_streaming:
            return None
        parse = GetMessageClass(method.output_type).FromString if plain == name else bytes
        return _unary_on_stream(full_path(method)[1:], client, parse)

    return _Stub(make)


def _unary_on_stream(path: str, client: CallStreamClient, parse: Callable[[bytes], Any]) -> Callable[..., Any]:
    async def call(request: Message, *, deadline: Deadline) -> Any:
        encoded = await client.call(
            path,
            request.SerializeToString(),
            time_left=_timeout(deadline),
            trace_context=trace_context.current(),
        )
        try:
            return parse(encoded)
        except DecodeError:
            raise Internal("the service sent a response that cannot be parsed") from None

    return call


_T = TypeVar("_T")


def remote_on_connections(
    descriptor: ServiceDescriptor, target: str, *, tls: Tls | None = None, role: str = "", max_message_bytes: int
) -> Any:
    """Returns a stub with the methods of a service whose responses are streams. Each call has a connection of its own.

    For servers that are called rarely: a channel of gRPC costs several times as much. Otherwise it behaves like
    ``remote`` on a channel of ``open_channel`` with these arguments.
    """
    methods = methods_by_python_name(descriptor)
    shown = _token_metadata(role)

    def make(name: str) -> Callable[..., Any] | None:
        method = methods.get(name)
        if method is None or method.client_streaming or not method.server_streaming:
            return None
        path, parse = full_path(method), _parser(GetMessageClass(method.output_type).FromString)

        async def call(request: Message, *, deadline: Deadline) -> AsyncGenerator[Any, None]:
            connection = await _in_time(
                lambda: ResponseConnection.open(
                    target,
                    path,
                    tls=tls,
                    role=role,
                    metadata=(*_timeout_metadata(deadline), *shown(), *(_metadata() or ())),
                    max_message_bytes=max_message_bytes,
                ),
                deadline,
            )
            try:
                responses = Responses(connection, request.SerializeToString())
                while (response := await _in_time(responses.read, deadline)) is not None:
                    yield _checked(parse(response))
            finally:
                connection.close()

        return call

    return _Stub(make)


def _timeout_metadata(deadline: Deadline) -> Metadata:
    remaining = _timeout(deadline)
    return () if remaining is None else (("grpc-timeout", f"{min(int(remaining * 1e3) + 1, 99_999_999)}m"),)


async def _in_time(step: Callable[[], Coroutine[Any, Any, _T]], deadline: Deadline) -> _T:
    """Returns the result of a step of a call; its failures become typed errors."""
    try:
        async with asyncio.timeout(_timeout(deadline)):
            return await step()
    except TimeoutError:
        raise DeadlineExceeded from None
    except CallFailed as failed:
        details = failed.trailers.get(STATUS_KEY.encode())
        trailing = grpc.aio.Metadata(*([(STATUS_KEY, from_base64(details))] if details else ()))
        status = grpc.aio.AioRpcError(failed.code, grpc.aio.Metadata(), trailing, failed.details)
        raise from_rpc_error(status) from None
    except ConnectionLost as lost:
        raise DependencyAway(str(lost)) from None
    except MessageTooLong as long:
        raise TooLarge(str(long)) from None
    except Http2Violation as violation:
        raise Internal(str(violation)) from None
