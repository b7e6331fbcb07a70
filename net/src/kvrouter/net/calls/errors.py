"""How a call on a call stream fails beside the errors with which its server answers."""

from __future__ import annotations

import grpc
from kvrouter.v1.calls_pb2 import CallFailure
from kvrouter.v1.error_encoding import to_parts
from kvrouter.v1.errors import DeadlineExceeded, DependencyAway, KvRouterError
from kvrouter.v1.errors_pb2 import ErrorInfo

_MAX_INFO_BYTES = 16 << 10
"""Maximum size of the details, far above what their documented limits allow; larger ones are left out."""


class NotSent(DependencyAway):
    """The server never ran the call. It may be repeated, here or elsewhere."""


class OutcomeUnknown(DependencyAway):
    """The stream ended after the call was sent. The server may have run it."""


class CallTimedOut(DeadlineExceeded):
    """The call was not answered in time. The server may have run it."""


class ProtocolViolation(Exception):
    """The peer broke a rule of the call stream. The stream ends; other streams are not affected."""

    def __init__(self, reason: str, detail: str, code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT) -> None:
        """``reason`` is a short label for metrics; ``detail`` says what was expected and what was received."""
        super().__init__(detail)
        self.reason = reason
        self.code = code


def failure_of(error: KvRouterError) -> CallFailure:
    """Returns an error as a message of bounded size."""
    code, message, info = to_parts(error)
    if info.ByteSize() > _MAX_INFO_BYTES:
        info = ErrorInfo(reason=info.reason)
    return CallFailure(code=code, message=message, info=info)
