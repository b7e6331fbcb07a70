"""Ends gRPC calls with typed errors."""

from __future__ import annotations

from typing import Any

import grpc.aio
from google.rpc.status_pb2 import Status
from kvrouter.v1.errors_pb2 import ErrorInfo

STATUS_KEY = "grpc-status-details-bin"
"""Metadata key of the details of an error, as gRPC defines it."""


def set_error(
    context: grpc.aio.ServicerContext[Any, Any], code: grpc.StatusCode, message: str, info: ErrorInfo
) -> None:
    """Sets the error with which a call ends when its handler returns.

    ``context.abort`` is no alternative: gRPC stores the exception that it raises, which would keep the request alive
    until the cyclic garbage collector runs.
    """
    status = Status(code=code.value[0], message=message)
    status.details.add().Pack(info)
    context.set_trailing_metadata(((STATUS_KEY, status.SerializeToString()),))
    context.set_code(code)
    context.set_details(message)
