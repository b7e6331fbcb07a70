"""How a call on a call stream fails beside the errors with which its server answers."""

from __future__ import annotations

from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from kvrouter.net.calls.limits import CallLimits
from kvrouter.v1.calls_pb2 import CallFailure
from kvrouter.v1.error_encoding import to_parts
from kvrouter.v1.errors import DeadlineExceeded, DependencyAway, KvRouterError
from kvrouter.v1.errors_pb2 import ErrorInfo

_MAX_INFO_BYTES = 16 << 10
"""Maximum size of the details, far above their documented limits; larger ones are left out."""


class NotSent(DependencyAway):
    """The server never ran the call. It may be repeated, here or elsewhere."""


class OutcomeUnknown(DependencyAway):
    """The stream ended after the call was sent. The server may have run it."""


class CallTimedOut(DeadlineExceeded):
    """The call was not answered in time. The server may have run it."""


class ProtocolViolation(Exception):
    """The peer broke a rule of the call stream. The stream ends; other streams are not affected."""

    def __init__(self, reason: str, detail: str, code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT) -> None:
        """``reason`` is a short label for metrics; ``detail`` says the expected and the received."""
        super().__init__(detail)
        self.reason = reason
        self.code = code


def failure_of(error: KvRouterError) -> CallFailure:
    """Returns an error as a message of bounded size."""
    code, message, info = to_parts(error)
    if info.ByteSize() > _MAX_INFO_BYTES:
        info = ErrorInfo(reason=info.reason)
    return CallFailure(code=code, message=message, info=info)


_M = TypeVar("_M", bound=Message)


def parse(kind: type[_M], encoded: bytes, limits: CallLimits) -> _M:
    """Returns a message of the client or of the server.

    Raises:
        ProtocolViolation: it is too long, is not a message of this kind, or has items not defined.
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
