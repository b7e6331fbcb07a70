"""Typed errors of the client. Each has what the server sent: reason, field, advice, and the time until a retry."""

from __future__ import annotations

from typing import ClassVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status
from kvrouter.v1.errors_pb2 import ErrorInfo, ErrorReason

_STATUS_KEY = "grpc-status-details-bin"


class KvRouterError(Exception):
    """A failed call. Its text says what is wrong and what to do."""

    message: str
    """What is wrong, without the advice."""
    code: grpc.StatusCode
    """gRPC status code."""
    reason: str
    """Name of the ``kvrouter.v1.ErrorReason`` without prefix, such as ``ALL_BUSY``; ``UNSPECIFIED`` for none."""
    advice: str
    """What to do; empty for none."""
    field: str
    """Path of the field at fault, such as ``stop_conditions.max_tokens``; empty for none."""
    known_values: tuple[str, ...]
    """Values that would have been valid."""
    retry_after: float | None
    """Seconds after which a retry may succeed; None if a retry of the same request cannot."""
    retry_elsewhere: bool
    """Whether the same call may succeed at another Frontend."""

    default_code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN

    def __init__(self, message: str, *, code: grpc.StatusCode | None = None, info: ErrorInfo | None = None) -> None:
        info = ErrorInfo() if info is None else info
        advice = f". {info.advice}" if info.advice else ""
        self.message = message.removesuffix(advice)
        super().__init__(self.message + advice)
        self.code = self.default_code if code is None else code
        # A newer server may send a reason that this contract does not name.
        known = info.reason in ErrorReason.values()
        self.reason = ErrorReason.Name(info.reason).removeprefix("ERROR_REASON_") if known else str(info.reason)
        self.advice = info.advice
        self.field = info.field
        self.known_values = tuple(info.known_values)
        self.retry_after = info.retry_after_ms / 1000 if info.HasField("retry_after_ms") else None
        self.retry_elsewhere = info.retry_elsewhere


class BadRequest(KvRouterError):
    """A field of the request is malformed or out of range. The client itself raises it too."""

    default_code = grpc.StatusCode.INVALID_ARGUMENT


class UnknownModel(KvRouterError):
    """No component serves the model. ``known_values`` has those that are served."""


class BlockSizeMismatch(KvRouterError):
    """The block size differs from the component's."""


class PromptTooLong(KvRouterError):
    """The prompt exceeds a limit."""


class UnknownWorker(KvRouterError):
    """The named worker or rank is not registered."""


class NotFound(KvRouterError):
    """The named object does not exist."""


class NoWorkers(KvRouterError):
    """No worker is eligible for the request."""


class AllBusy(KvRouterError):
    """Every eligible worker is busy. Retry after ``retry_after`` seconds."""


class NotReady(KvRouterError):
    """A service has not restored its state yet."""


class WorkerLost(KvRouterError):
    """The worker failed while it served the request. Send the request again."""


class PoisonPrompt(KvRouterError):
    """Workers died while they ran the request, or requests with the same prompt. Do not send it again."""

    default_code = grpc.StatusCode.FAILED_PRECONDITION


class RequestIdReused(KvRouterError):
    """The request id is booked with other content."""


class SessionLost(KvRouterError):
    """The session is unknown or has ended."""


class DeadlineExceeded(KvRouterError):
    """The deadline has passed or cannot be met."""


class Draining(KvRouterError):
    """The Frontend is stopping."""


class DependencyAway(KvRouterError):
    """A service that the Frontend needs is away."""


class TooMuchUnread(KvRouterError):
    """More output waited to be read than the bound allows."""


class Unauthenticated(KvRouterError):
    """The call has no valid credential. Pass ``api_key``."""


class PermissionDenied(KvRouterError):
    """The caller may not do this: another role, model, tenant or priority is needed."""


class ServiceRefused(KvRouterError):
    """A service behind the Frontend does not admit the Frontend. The operator must correct the deployment."""


class RateLimited(KvRouterError):
    """The caller exceeded a limit of its key or tenant. Retry after ``retry_after`` seconds."""


class Overloaded(KvRouterError):
    """A service has more work than it can finish in time. Retry after ``retry_after`` seconds."""


class TooLarge(KvRouterError):
    """A message or the number of running calls exceeds a limit."""


class NotConnected(KvRouterError):
    """No Frontend can be reached, or the connection was lost during the call."""

    default_code = grpc.StatusCode.UNAVAILABLE


class ClientClosed(KvRouterError):
    """The client is used before its context is entered or after it is left."""

    default_code = grpc.StatusCode.FAILED_PRECONDITION


class WrongEventLoop(KvRouterError):
    """The client is used in another event loop than the one in which its context was entered."""

    default_code = grpc.StatusCode.FAILED_PRECONDITION


_BY_REASON: dict[int, type[KvRouterError]] = {
    ErrorReason.ERROR_REASON_BAD_REQUEST: BadRequest,
    ErrorReason.ERROR_REASON_UNKNOWN_MODEL: UnknownModel,
    ErrorReason.ERROR_REASON_BLOCK_SIZE_MISMATCH: BlockSizeMismatch,
    ErrorReason.ERROR_REASON_PROMPT_TOO_LONG: PromptTooLong,
    ErrorReason.ERROR_REASON_UNKNOWN_WORKER: UnknownWorker,
    ErrorReason.ERROR_REASON_NO_WORKERS: NoWorkers,
    ErrorReason.ERROR_REASON_ALL_BUSY: AllBusy,
    ErrorReason.ERROR_REASON_NOT_READY: NotReady,
    ErrorReason.ERROR_REASON_WORKER_LOST: WorkerLost,
    ErrorReason.ERROR_REASON_POISON_PROMPT: PoisonPrompt,
    ErrorReason.ERROR_REASON_REQUEST_ID_REUSED: RequestIdReused,
    ErrorReason.ERROR_REASON_SESSION_LOST: SessionLost,
    ErrorReason.ERROR_REASON_DEADLINE: DeadlineExceeded,
    ErrorReason.ERROR_REASON_DRAINING: Draining,
    ErrorReason.ERROR_REASON_DEPENDENCY_AWAY: DependencyAway,
    ErrorReason.ERROR_REASON_TOO_MUCH_UNREAD: TooMuchUnread,
    ErrorReason.ERROR_REASON_UNAUTHENTICATED: Unauthenticated,
    ErrorReason.ERROR_REASON_PERMISSION_DENIED: PermissionDenied,
    ErrorReason.ERROR_REASON_RATE_LIMITED: RateLimited,
    ErrorReason.ERROR_REASON_SERVICE_REFUSED: ServiceRefused,
    ErrorReason.ERROR_REASON_OVERLOADED: Overloaded,
}
_BY_CODE: dict[grpc.StatusCode, type[KvRouterError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: BadRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.RESOURCE_EXHAUSTED: TooLarge,
}


def error_of(code: grpc.StatusCode, message: str, info: ErrorInfo | None) -> KvRouterError:
    """Returns the error that a server describes.

    Args:
        code: gRPC status code.
        message: What is wrong.
        info: Details; None if gRPC itself generated the error.
    """
    if info is None and code is grpc.StatusCode.UNAVAILABLE:
        return NotConnected(message, info=ErrorInfo(retry_after_ms=0, retry_elsewhere=True))
    kind = _BY_REASON.get(info.reason) if info is not None else None
    return (kind or _BY_CODE.get(code, KvRouterError))(message, code=code, info=info)


def error_of_rpc(error: grpc.aio.AioRpcError) -> KvRouterError:
    """Returns the typed error of a failed RPC."""
    return error_of(error.code(), error.details() or error.code().name, _info(error))


def _info(error: grpc.aio.AioRpcError) -> ErrorInfo | None:
    for key, value in error.trailing_metadata() or ():
        if key == _STATUS_KEY and isinstance(value, bytes):
            info = ErrorInfo()
            try:
                if any(detail.Unpack(info) for detail in Status.FromString(value).details):
                    return info
            except DecodeError:
                return None
    return None


def bad_request(message: str, *, field: str, advice: str) -> BadRequest:
    """Returns the error for an argument that is refused before anything is sent."""
    reason = ErrorReason.ERROR_REASON_BAD_REQUEST
    return BadRequest(message, info=ErrorInfo(reason=reason, field=field, advice=advice))
