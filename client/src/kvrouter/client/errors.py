"""Errors of a client only, beside those of the contract (``kvrouter.v1.errors``)."""

from __future__ import annotations

import grpc
from kvrouter.v1.error_encoding import from_rpc_error
from kvrouter.v1.errors import DependencyAway, KvRouterError
from kvrouter.v1.errors_pb2 import ErrorReason


class NotConnected(KvRouterError, code=grpc.StatusCode.UNAVAILABLE):
    """No Frontend can be reached, or the connection was lost during the call."""


class ClientClosed(KvRouterError, code=grpc.StatusCode.FAILED_PRECONDITION):
    """The client is used before its context is entered or after it is left."""


class WrongEventLoop(KvRouterError, code=grpc.StatusCode.FAILED_PRECONDITION):
    """The client is used in another event loop than the one in which its context was entered."""


def error_of_rpc(failed: grpc.aio.AioRpcError) -> KvRouterError:
    """Returns the typed error of a failed RPC."""
    error = from_rpc_error(failed)
    # A service that is away has a reason. gRPC itself gives none.
    if isinstance(error, DependencyAway) and error.info.reason == ErrorReason.ERROR_REASON_UNSPECIFIED:
        return NotConnected(error.message, retry_after_ms=0, retry_elsewhere=True)
    return error
