"""Stubs whose calls travel on a call stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from kvrouter.net import trace_context
from kvrouter.net.calls import CallStreamClient
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc.methods import full_path, methods_by_python_name
from kvrouter.v1.errors import DeadlineExceeded, Internal


def remote_on_call_stream(descriptor: ServiceDescriptor, client: CallStreamClient) -> Any:
    """Returns a stub of a service, to be cast to its protocol in ``kvrouter.runtime.contracts``.

    It has the service's unary methods, and behaves like ``kvrouter.runtime.rpc.remote``. A call not sent, or
    whose outcome is unknown, raises ``DependencyAway``. A method whose name has the suffix ``_encoded`` returns the
    encoded response.
    """
    return _Stub(descriptor, client)


class _Stub:
    def __init__(self, descriptor: ServiceDescriptor, client: CallStreamClient) -> None:
        self._methods = methods_by_python_name(descriptor)
        self._client = client

    def __getattr__(self, name: str) -> Any:
        plain = name.removesuffix("_encoded")
        method = self._methods.get(plain)
        if method is None or method.client_streaming or method.server_streaming:
            raise AttributeError(name)
        call = (_unary if plain == name else _encoded)(method, self._client)
        setattr(self, name, call)
        return call


def _encoded(method: MethodDescriptor, client: CallStreamClient) -> Callable[..., Any]:
    path = full_path(method)[1:]

    async def call(request: Message, *, deadline: Deadline) -> bytes:
        if deadline.expired:
            raise DeadlineExceeded
        return await client.call(
            path,
            request.SerializeToString(),
            time_left=deadline.remaining(),
            trace_context=trace_context.current(),
        )

    return call


def _unary(method: MethodDescriptor, client: CallStreamClient) -> Callable[..., Any]:
    encoded = _encoded(method, client)
    parse = GetMessageClass(method.output_type).FromString

    async def call(request: Message, *, deadline: Deadline) -> Any:
        return _parsed(parse, await encoded(request, deadline=deadline))

    return call


def _parsed(parse: Callable[[bytes], Any], encoded: bytes) -> Any:
    try:
        return parse(encoded)
    except DecodeError:
        raise Internal("the service sent a response that cannot be parsed") from None
