"""Encodes errors for messages, gRPC and HTTP.

Of a gRPC call, an error is a ``google.rpc.Status``, whose details the libraries of every language read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2 as standard
from google.rpc.status_pb2 import Status
from kvrouter.v1.errors import (
    CLASSES,
    MAX_TEXT,
    BadRequest,
    DeadlineExceeded,
    DependencyAway,
    Internal,
    KvRouterError,
    NotFound,
    OutOfRange,
    ServiceRefused,
    TooLarge,
    Unimplemented,
)
from kvrouter.v1.errors_pb2 import ErrorInfo, ErrorReason

STATUS_KEY = "grpc-status-details-bin"
"""Metadata key of the details of an error, as gRPC defines it."""
DOMAIN = "kvrouter"
"""Domain of the reasons in ``google.rpc.ErrorInfo``."""

_MAX_BYTES = 4096
"""Size beyond which standard details are left out: gRPC accepts 8 KiB of trailing metadata, in which the status is
encoded as base64, beside the message."""
_RESOURCE_TYPES = {
    ErrorReason.ERROR_REASON_UNKNOWN_MODEL: "model",
    ErrorReason.ERROR_REASON_UNKNOWN_WORKER: "worker",
    ErrorReason.ERROR_REASON_REQUEST_ID_REUSED: "request",
    ErrorReason.ERROR_REASON_SESSION_LOST: "session",
}


HTTP_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 503,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    grpc.StatusCode.UNIMPLEMENTED: 501,
}
"""HTTP statuses of gRPC codes; 500 for others."""
_BUSY_STATUS = 429
"""HTTP status of ``_BUSY``, unlike 503 when there is no worker: clients of the OpenAI API retry it."""
_BUSY = frozenset(
    {
        ErrorReason.ERROR_REASON_ALL_BUSY,
        ErrorReason.ERROR_REASON_RATE_LIMITED,
        ErrorReason.ERROR_REASON_OVERLOADED,
    }
)
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_CLASS_OF_CODE: dict[grpc.StatusCode, type[KvRouterError]] = {
    kind.code: kind
    for kind in (BadRequest, DeadlineExceeded, DependencyAway, OutOfRange, Unimplemented, TooLarge, Internal, NotFound)
}
"""Classes of errors without a known reason, such as those that gRPC itself generates."""


def to_parts(error: KvRouterError) -> tuple[int, str, ErrorInfo]:
    """Returns number of the gRPC code, message and details, to embed the error in another message."""
    return error.code.value[0], error.message[:MAX_TEXT], error.info


def from_parts(code: int, message: str, info: ErrorInfo | None = None) -> KvRouterError:
    """Restores an error from ``to_parts``. A message that ends with the advice loses it."""
    status = _CODES.get(code, grpc.StatusCode.UNKNOWN)
    info = ErrorInfo() if info is None else info
    kind = CLASSES.get(info.reason) or _CLASS_OF_CODE.get(status, KvRouterError)
    if kind is ServiceRefused:
        # For this process's own callers, a service that does not admit it is unavailable.
        status = kind.code
    return kind.restored(message.removesuffix(f". {info.advice}") if info.advice else message, status, info)


def http_status(code: grpc.StatusCode, reason: ErrorReason) -> int:
    """Returns the HTTP status of an error."""
    return _BUSY_STATUS if reason in _BUSY else HTTP_STATUS.get(code, 500)


def error_status(error: KvRouterError) -> Status:
    """Returns an error with its own details and as many of the standard ones as metadata have room for."""
    code, message, info = to_parts(error)
    status = Status(code=code, message=f"{message}. {info.advice}" if info.advice else message)
    status.details.add().Pack(info)
    for detail in _standard_details(error, message):
        if status.ByteSize() + detail.ByteSize() <= _MAX_BYTES:
            status.details.add().Pack(detail)
    return status


class StatusContext(Protocol):
    """What a gRPC handler sets the status of its call with: a part of grpc.aio.ServicerContext."""

    def set_trailing_metadata(self, trailing_metadata: tuple[tuple[str, str | bytes], ...], /) -> None:
        """Sets the metadata sent with the status."""

    def set_code(self, code: grpc.StatusCode, /) -> None:
        """Sets the code of the status."""

    def set_details(self, details: str, /) -> None:
        """Sets the message of the status."""


def set_error(context: StatusContext, error: KvRouterError) -> None:
    """Sets the error with which a call ends when its handler returns.

    ``context.abort`` raises an exception, whose traceback would keep the request alive until the cyclic garbage
    collector runs.
    """
    status = error_status(error)
    context.set_trailing_metadata(((STATUS_KEY, status.SerializeToString()),))
    context.set_code(error.code)
    context.set_details(status.message)


def from_rpc_error(error: grpc.aio.AioRpcError) -> KvRouterError:
    """Returns the error the service raised."""
    code: int = error.code().value[0]
    return from_parts(code, error.details() or error.code().name, _info_of(error))


def _info_of(error: grpc.aio.AioRpcError) -> ErrorInfo | None:
    for key, value in error.trailing_metadata() or ():
        if key != STATUS_KEY or not isinstance(value, bytes):
            continue
        try:
            info = ErrorInfo()
            if any(detail.Unpack(info) for detail in Status.FromString(value).details):
                return info
        except DecodeError:
            return None
    return None


def _standard_details(error: KvRouterError, message: str) -> Iterator[Message]:
    """Yields the details of google.rpc that fit an error, the most useful first."""
    code, info = error.code, error.info
    if "retry_after_ms" in info:
        retry = standard.RetryInfo()
        retry.retry_delay.FromMilliseconds(info.retry_after_ms)
        yield retry
    # A reason that this release does not know came from a newer service.
    is_known = info.reason in ErrorReason.values() and info.reason != ErrorReason.ERROR_REASON_UNSPECIFIED
    metadata = {"field": info.field, "known_values": ", ".join(info.known_values)}
    yield standard.ErrorInfo(
        reason=error.reason if is_known else code.name,
        domain=DOMAIN,
        metadata={name: value for name, value in metadata.items() if value},
    )
    if info.field and code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE):
        violation = standard.BadRequest.FieldViolation(field=info.field, description=message)
        yield standard.BadRequest(field_violations=[violation])
    if info.resource_name:
        kind = _RESOURCE_TYPES.get(info.reason, info.field)
        yield standard.ResourceInfo(resource_type=kind, resource_name=info.resource_name, description=message)
    if info.advice:
        yield standard.Help(links=[standard.Help.Link(description=info.advice)])
