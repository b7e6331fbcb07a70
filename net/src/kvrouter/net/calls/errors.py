"""How a call on a call stream fails."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import grpc
from kvrouter.v1.calls_pb2 import CallFailure
from kvrouter.v1.errors_pb2 import ErrorInfo, ErrorReason

_MAX_TEXT = 512
"""Maximum number of characters of a message; a longer one is cut."""
_MAX_INFO_BYTES = 16 << 10
"""Maximum size of the details, far above what their documented limits allow; larger ones are left out."""

_CODES: Mapping[int, grpc.StatusCode] = MappingProxyType({code.value[0]: code for code in grpc.StatusCode})


class CallError(Exception):
    """A call failed."""


class NotSent(CallError):
    """The server never ran the call. It may be repeated, here or elsewhere."""


class OutcomeUnknown(CallError):
    """The stream ended after the call was sent. The server may have run it."""


class CallTimedOut(CallError):
    """The call was not answered in time. The server may have run it."""


class CallRefused(CallError):
    """The server answered the call with an error. Handlers raise it to refuse a call."""

    def __init__(self, code: grpc.StatusCode, message: str, info: ErrorInfo | None = None) -> None:
        """``info`` has the typed details, if there are any."""
        super().__init__(message)
        self.code = code
        self.info = ErrorInfo() if info is None else info

    def to_message(self) -> CallFailure:
        """Returns the error as a message of bounded size."""
        info = self.info if self.info.ByteSize() <= _MAX_INFO_BYTES else ErrorInfo(reason=self.info.reason)
        return CallFailure(code=self.code.value[0], message=str(self)[:_MAX_TEXT], info=info)


class TooMuchUnread(CallRefused):
    """More of the call's responses waited to be read than its bound allows. The call has ended."""

    def __init__(self, message: str) -> None:
        super().__init__(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            message,
            ErrorInfo(
                reason=ErrorReason.ERROR_REASON_TOO_MUCH_UNREAD, advice="Read the output as fast as it is produced."
            ),
        )


class ProtocolViolation(Exception):
    """The peer broke a rule of the call stream. The stream ends; other streams are not affected."""

    def __init__(self, reason: str, detail: str, code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT) -> None:
        """``reason`` is a short label for metrics; ``detail`` says what was expected and what was received."""
        super().__init__(detail)
        self.reason = reason
        self.code = code


def status_code(failure: CallFailure) -> grpc.StatusCode:
    """Returns the code of a failure; UNKNOWN for a number that is not defined."""
    return _CODES.get(failure.code, grpc.StatusCode.UNKNOWN)


def refusal(failure: CallFailure) -> CallRefused:
    """Returns the error that a failure message stands for."""
    if failure.info.reason == ErrorReason.ERROR_REASON_TOO_MUCH_UNREAD:
        return TooMuchUnread(failure.message)
    return CallRefused(status_code(failure), failure.message, failure.info)
