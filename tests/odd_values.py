"""Requests with values that nobody means: each call gets an answer or a typed refusal, never INTERNAL."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from random import Random
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from kvrouter.v1.error_encoding import from_rpc_error
from kvrouter.v1.errors import KvRouterError

SEED = int(os.environ.get("KVROUTER_SEED", "1"))

_STRINGS = ("", "x", "a/b", "\x00", "é" * 100, "x" * 300, "..", " ", "{}", "*", ">", "kv", "direct")
_FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan"))
_UNSIGNED = (0, 1, 2, 7, 16, 100, 4095, 1 << 20)
_TYPES = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}


class OddValues:
    """Draws messages. Fields in ``known`` are mostly right, so that requests get far."""

    def __init__(self, known: Mapping[str, Sequence[Any]], seed: int = SEED) -> None:
        self._known = known
        self._draw = Random(seed)

    def message(self, descriptor: Descriptor) -> Message:
        message = GetMessageClass(descriptor)()
        self._fill(message)
        return message

    def _fill(self, message: Message) -> None:
        for field in message.DESCRIPTOR.fields:
            if self._draw.random() < 0.3 + 0.4 * (field.name not in self._known):
                continue
            if field.is_repeated:
                self._fill_repeated(message, field)
            elif field.message_type is not None:
                getattr(message, field.name).SetInParent()
                self._fill(getattr(message, field.name))
            else:
                setattr(message, field.name, self._value(field))

    def _fill_repeated(self, message: Message, field: FieldDescriptor) -> None:
        values: Any = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            if value.message_type is None:
                values[self._value(key)] = self._value(value)
            return
        for _ in range(self._draw.choice((0, 1, 2, 40))):
            if field.message_type is None:
                values.append(self._value(field))
            else:
                self._fill(values.add())

    def _value(self, field: FieldDescriptor) -> Any:
        draw = self._draw
        known = self._known.get(field.name)
        if known and draw.random() < 0.9:
            return draw.choice(known)
        if field.enum_type is not None:
            return draw.choice([0, 1, 2, 99, *field.enum_type.values_by_number])
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
                return draw.randbytes(draw.choice((0, 8, 100)))
            case FieldDescriptor.CPPTYPE_STRING:
                return draw.choice(_STRINGS)
            case FieldDescriptor.CPPTYPE_DOUBLE:
                return draw.choice(_FLOATS)
            case FieldDescriptor.CPPTYPE_FLOAT:
                return draw.choice((0.0, -1.0, float("nan"), float("inf")))
            case FieldDescriptor.CPPTYPE_BOOL:
                return draw.random() < 0.5
            case kind:
                return draw.choice((*_UNSIGNED, *_TYPES[kind]))


async def nothing_fails(
    channel: grpc.aio.Channel, service: ServiceDescriptor, odd: OddValues, *, times: int, leave_out: Sequence[str] = ()
) -> None:
    """Calls every method of a service so many times."""
    for method in service.methods:
        if method.name not in leave_out:
            for _ in range(times):
                request = odd.message(method.input_type)
                error = await _call(channel, method, request)
                bad = error is not None and error.code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
                assert not bad, f"{method.name} {error}: {request}"


async def _call(channel: grpc.aio.Channel, method: MethodDescriptor, request: Message) -> KvRouterError | None:
    path = f"/{method.containing_service.full_name}/{method.name}"
    encode = type(request).SerializeToString
    try:
        async with asyncio.timeout(30):
            if method.client_streaming and method.server_streaming:
                async for _ in channel.stream_stream(path, request_serializer=encode)(_once(request), timeout=2):
                    pass
            elif method.client_streaming:
                await channel.stream_unary(path, request_serializer=encode)(_once(request), timeout=2)
            elif method.server_streaming:
                async for _ in channel.unary_stream(path, request_serializer=encode)(request, timeout=2):
                    pass
            else:
                await channel.unary_unary(path, request_serializer=encode)(request, timeout=2)
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    return None


async def _once(request: Message) -> AsyncIterator[Message]:
    yield request
