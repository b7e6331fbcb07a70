"""Stubs whose calls travel on a call stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from kvrouter.net.calls import CallError, CallStreamClient, RunningCall
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import DeadlineExceeded, Internal, from_call_error
from kvrouter.runtime.rpc.method_names import full_path, methods_by_python_name


def remote_on_call_stream(descriptor: ServiceDescriptor, client: CallStreamClient) -> Any:
    """Returns a stub of a service, to be cast to its protocol in ``kvrouter.runtime.contracts``.

    It has the service's unary and bidirectional methods, and behaves like ``kvrouter.runtime.rpc.remote``. A call that
    was not sent, or whose outcome is unknown, raises ``DependencyAway``. A unary method whose name has the suffix
    ``_encoded`` returns the encoded response.
    """
    return _Stub(descriptor, client)


class _Stub:
    def __init__(self, descriptor: ServiceDescriptor, client: CallStreamClient) -> None:
        self._methods = methods_by_python_name(descriptor)
        self._client = client

    def __getattr__(self, name: str) -> Any:
        plain = name.removesuffix("_encoded")
        method = self._methods.get(plain)
        if method is None or method.client_streaming != method.server_streaming:
            raise AttributeError(name)
        if plain == name:
            adapt = _session if method.client_streaming else _unary
        elif not method.client_streaming:
            adapt = _encoded
        else:
            raise AttributeError(name)
        call = adapt(method, self._client)
        setattr(self, name, call)
        return call


def _encoded(method: MethodDescriptor, client: CallStreamClient) -> Callable[..., Any]:
    path = full_path(method)[1:]

    async def call(request: Message, *, deadline: Deadline) -> bytes:
        if deadline.expired:
            raise DeadlineExceeded
        try:
            return await client.call(path, request.SerializeToString(), time_left=deadline.remaining())
        except CallError as error:
            raise from_call_error(error) from None

    return call


def _unary(method: MethodDescriptor, client: CallStreamClient) -> Callable[..., Any]:
    encoded = _encoded(method, client)
    parse = GetMessageClass(method.output_type).FromString

    async def call(request: Message, *, deadline: Deadline) -> Any:
        return _parsed(parse, await encoded(request, deadline=deadline))

    return call


def _session(method: MethodDescriptor, client: CallStreamClient) -> Callable[..., AsyncGenerator[Any, None]]:
    path = full_path(method)[1:]
    parse = GetMessageClass(method.output_type).FromString

    async def call(requests: AsyncIterator[Message], *, deadline: Deadline) -> AsyncGenerator[Any, None]:
        first = await anext(requests, None)
        if first is None:
            return
        received = _Received()
        try:
            await client.wait_open()
            running = client.start(path, first.SerializeToString(), received, time_left=deadline.remaining())
        except CallError as error:
            raise from_call_error(error) from None
        sending = asyncio.create_task(_send(requests, running, received), name="call-stream-send")
        try:
            while (item := await received.items.get()) is not None:
                if isinstance(item, Exception):
                    raise from_call_error(item) if isinstance(item, CallError) else item
                yield _parsed(parse, item)
        finally:
            running.cancel()
            sending.cancel()
            await asyncio.wait([sending])
            del sending

    return call


class _Received:
    """Keeps what is received of a call until it is read: responses, then an error or None."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()

    def on_response(self, encoded: bytes) -> None:
        self.items.put_nowait(encoded)

    def on_end(self) -> None:
        self.items.put_nowait(None)

    def on_error(self, error: CallError) -> None:
        self.items.put_nowait(error)


async def _send(requests: AsyncIterator[Message], running: RunningCall, received: _Received) -> None:
    """Sends the further requests of a call. An error of the iterator ends the call."""
    try:
        async for request in requests:
            running.send(request.SerializeToString())
        running.end_requests()
    except Exception as error:
        received.items.put_nowait(error)


def _parsed(parse: Callable[[bytes], Any], encoded: bytes) -> Any:
    try:
        return parse(encoded)
    except DecodeError:
        raise Internal("the service sent a response that cannot be parsed") from None
