"""Parses messages of call streams."""

from __future__ import annotations

from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from kvrouter.net.calls.errors import ProtocolViolation
from kvrouter.net.calls.limits import CallLimits

_M = TypeVar("_M", bound=Message)


def parse(kind: type[_M], encoded: bytes, limits: CallLimits) -> _M:
    """Returns a message of the client or of the server.

    Raises:
        ProtocolViolation: it is too long, is not a message of this kind, or has items that are not defined.
    """
    if len(encoded) > limits.message_bytes:
        raise ProtocolViolation(
            "too_long", f"expected messages of at most {limits.message_bytes} bytes, received {len(encoded)}"
        )
    try:
        message = kind.FromString(encoded)
    except DecodeError:
        raise ProtocolViolation("garbage", f"expected an encoded {kind.DESCRIPTOR.name}") from None
    if len(UnknownFieldSet(message)):
        raise ProtocolViolation(
            "unknown_kind", "received an item of a kind that is not defined", grpc.StatusCode.UNIMPLEMENTED
        )
    return message
