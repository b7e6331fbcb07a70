"""Ends gRPC calls with typed errors, whose details the standard libraries of every language read too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc.aio
from google.protobuf.message import Message
from google.rpc import error_details_pb2 as standard
from google.rpc.status_pb2 import Status
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


def with_advice(message: str, info: ErrorInfo) -> str:
    """Returns the message of an error as clients show it: what is wrong, and what to do."""
    return f"{message}. {info.advice}" if info.advice else message


def without_advice(message: str, info: ErrorInfo) -> str:
    """Returns what is wrong, from a message that may end with the advice."""
    return message.removesuffix(f". {info.advice}") if info.advice else message


def error_status(code: grpc.StatusCode, message: str, info: ErrorInfo) -> Status:
    """Returns an error with its own details and as many of the standard ones as metadata have room for."""
    status = Status(code=code.value[0], message=with_advice(message, info))
    status.details.add().Pack(info)
    for detail in _standard_details(code, message, info):
        if status.ByteSize() + detail.ByteSize() <= _MAX_BYTES:
            status.details.add().Pack(detail)
    return status


def set_error(
    context: grpc.aio.ServicerContext[Any, Any], code: grpc.StatusCode, message: str, info: ErrorInfo
) -> None:
    """Sets the error with which a call ends when its handler returns.

    ``context.abort`` is no alternative: gRPC stores the exception that it raises, which would keep the request alive
    until the cyclic garbage collector runs.
    """
    status = error_status(code, message, info)
    context.set_trailing_metadata(((STATUS_KEY, status.SerializeToString()),))
    context.set_code(code)
    context.set_details(status.message)


def _standard_details(code: grpc.StatusCode, message: str, info: ErrorInfo) -> Iterator[Message]:
    """Yields the details of google.rpc that fit an error, the most useful first."""
    if info.HasField("retry_after_ms"):
        retry = standard.RetryInfo()
        retry.retry_delay.FromMilliseconds(info.retry_after_ms)
        yield retry
    # A reason that this release does not know came from a newer service.
    is_known = info.reason in ErrorReason.values() and info.reason != ErrorReason.ERROR_REASON_UNSPECIFIED
    reason = ErrorReason.Name(info.reason).removeprefix("ERROR_REASON_") if is_known else code.name
    metadata = {"field": info.field, "known_values": ", ".join(info.known_values)}
    yield standard.ErrorInfo(
        reason=reason, domain=DOMAIN, metadata={name: value for name, value in metadata.items() if value}
    )
    if info.field and code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE):
        violation = standard.BadRequest.FieldViolation(field=info.field, description=message)
        yield standard.BadRequest(field_violations=[violation])
    if info.resource_name:
        kind = _RESOURCE_TYPES.get(info.reason, info.field)
        yield standard.ResourceInfo(resource_type=kind, resource_name=info.resource_name, description=message)
    if info.advice:
        yield standard.Help(links=[standard.Help.Link(description=info.advice)])
