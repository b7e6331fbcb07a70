"""Errors that a caller can act on, and their form on the wire.

A service raises them. Over gRPC they travel as a status code with a ``google.rpc.Status`` that carries
``kvrouter.v1.ErrorInfo`` (and ``google.rpc.RetryInfo`` where a retry may succeed), and the stub raises the same class
again: a caller handles an object in its own process and one behind a socket alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Self

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from kvrouter.v1.errors_pb2 import ErrorInfo, ErrorReason

STATUS_KEY = "grpc-status-details-bin"
"""Key of the trailing metadata that carries a google.rpc.Status."""

_MAX_KNOWN_VALUES = 16
_MAX_TEXT = 512
"""Characters of a message or value that are sent: trailing metadata has to fit in 8 KiB."""

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class KvRouterError(Exception):
    """Why a call failed. The message says what is wrong, ``info.advice`` what to do about it; neither holds tokens."""

    status: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    reason: ClassVar[ErrorReason] = ErrorReason.ERROR_REASON_UNSPECIFIED

    code: grpc.StatusCode
    """Canonical code of the failure."""
    info: ErrorInfo
    """Its typed detail."""

    def __init__(
        self,
        message: str,
        *,
        advice: str = "",
        field: str = "",
        known: Iterable[object] = (),
        retry_after_ms: int | None = None,
        retry_elsewhere: bool = False,
    ) -> None:
        super().__init__(message)
        self.code = self.status
        self.info = ErrorInfo(
            reason=self.reason,
            advice=advice[:_MAX_TEXT],
            field=field[:_MAX_TEXT],
            known_values=[str(value)[:128] for value, _ in zip(known, range(_MAX_KNOWN_VALUES), strict=False)],
            retry_after_ms=retry_after_ms,
            retry_elsewhere=retry_elsewhere,
        )

    @property
    def message(self) -> str:
        """What is wrong, for a person."""
        return str(self)

    def untraced(self) -> Self:
        """Returns an equal error without traceback and context, to be raised where this one is kept.

        A traceback keeps the frames that it goes through, and the messages in them. A frame that keeps the error as
        well is freed by the cyclic garbage collector only, which may let hundreds of requests gather.
        """
        copy = type(self)._restored(self.code, str(self), self.info)
        copy.__dict__.update(self.__dict__)
        return copy

    def after(self, earlier: str) -> KvRouterError:
        """Returns the same error with what went wrong earlier in its message."""
        return self._restored(self.code, f"{self}; before that, {earlier}", self.info)

    @classmethod
    def _restored(cls, code: grpc.StatusCode, message: str, info: ErrorInfo) -> Self:
        error = cls.__new__(cls)
        Exception.__init__(error, message)
        error.code = code
        error.info = info
        return error


class BadRequest(KvRouterError):
    """A field of the request is malformed or out of range."""

    status = grpc.StatusCode.INVALID_ARGUMENT
    reason = ErrorReason.ERROR_REASON_BAD_REQUEST

    def __init__(self, message: str, *, field: str = "", advice: str = "", known: Iterable[object] = ()) -> None:
        super().__init__(message, field=field, advice=advice, known=known)


class UnknownModel(KvRouterError):
    """No component serves the model."""

    status = grpc.StatusCode.NOT_FOUND
    reason = ErrorReason.ERROR_REASON_UNKNOWN_MODEL

    def __init__(self, model: str, known: Iterable[str] = ()) -> None:
        models = sorted(known)
        advice = (
            f"Ask for one of: {', '.join(models[:_MAX_KNOWN_VALUES])}." if models else "Start a worker that serves it."
        )
        super().__init__(f"no component serves the model {model[:128]!r}", field="model", advice=advice, known=models)


class BlockSizeMismatch(KvRouterError):
    """The block size differs from the component's."""

    status = grpc.StatusCode.INVALID_ARGUMENT
    reason = ErrorReason.ERROR_REASON_BLOCK_SIZE_MISMATCH

    def __init__(self, got: int, expected: int) -> None:
        super().__init__(
            f"the block size is {got}, the component's is {expected}",
            field="block_size",
            advice=f"Hash the prompt in blocks of {expected} tokens.",
            known=[expected],
        )


class PromptTooLong(KvRouterError):
    """The prompt exceeds the limit."""

    status = grpc.StatusCode.INVALID_ARGUMENT
    reason = ErrorReason.ERROR_REASON_PROMPT_TOO_LONG

    def __init__(self, tokens: int, limit: int, *, field: str = "token_ids") -> None:
        super().__init__(
            f"the prompt has {tokens} tokens, the limit is {limit}",
            field=field,
            advice=f"Send {limit} tokens at most.",
            known=[limit],
        )


class UnknownWorker(KvRouterError):
    """The named worker or rank is not registered."""

    status = grpc.StatusCode.NOT_FOUND
    reason = ErrorReason.ERROR_REASON_UNKNOWN_WORKER

    def __init__(self, worker_id: int, known: Iterable[int] = (), *, dp_rank: int | None = None) -> None:
        workers = sorted(known)
        named = f"worker {worker_id}" if dp_rank is None else f"rank {dp_rank} of worker {worker_id}"
        advice = f"Name one of: {', '.join(map(str, workers[:_MAX_KNOWN_VALUES]))}." if workers else "Start a worker."
        super().__init__(f"{named} is not registered", field="constraints.worker_id", advice=advice, known=workers)


class NotFound(KvRouterError):
    """What was named does not exist."""

    status = grpc.StatusCode.NOT_FOUND


class UnknownComponent(NotFound):
    """No component has that name. Comes out of a stub as ``NotFound``."""

    def __init__(self, component: object, known: Iterable[object] = ()) -> None:
        components = sorted(map(str, known))
        advice = f"Name one of: {', '.join(components[:_MAX_KNOWN_VALUES])}." if components else "Start a worker in it."
        super().__init__(
            f"no component is named {str(component)[:160]!r}", field="component", advice=advice, known=components
        )


class NoWorkers(KvRouterError):
    """The component has no worker that fits the request."""

    status = grpc.StatusCode.UNAVAILABLE
    reason = ErrorReason.ERROR_REASON_NO_WORKERS

    def __init__(self, message: str, *, retry_after_ms: int = 1000) -> None:
        super().__init__(
            message, advice="Start a worker that fits the request, or retry later.", retry_after_ms=retry_after_ms
        )


class AllBusy(KvRouterError):
    """Every worker that fits is busy."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = ErrorReason.ERROR_REASON_ALL_BUSY

    def __init__(self, retry_after_ms: int, message: str = "every worker that fits the request is busy") -> None:
        super().__init__(message, advice="Retry after the given time.", retry_after_ms=retry_after_ms)


class NotReady(KvRouterError):
    """The service has not restored its state yet."""

    status = grpc.StatusCode.UNAVAILABLE
    reason = ErrorReason.ERROR_REASON_NOT_READY

    def __init__(self, message: str, *, retry_after_ms: int = 500) -> None:
        super().__init__(
            message,
            advice="Retry after the given time, or at another replica.",
            retry_after_ms=retry_after_ms,
            retry_elsewhere=True,
        )


class WorkerLost(KvRouterError):
    """The worker failed or went away while it served the request."""

    status = grpc.StatusCode.UNAVAILABLE
    reason = ErrorReason.ERROR_REASON_WORKER_LOST

    worker_id: int = 0
    """The worker; 0 where the error came over the wire."""

    def __init__(self, worker_id: int, message: str) -> None:
        super().__init__(message, advice="Send the request again.", retry_after_ms=0)
        self.worker_id = worker_id


class RequestIdReused(KvRouterError):
    """The request id is booked with other content."""

    status = grpc.StatusCode.ALREADY_EXISTS
    reason = ErrorReason.ERROR_REASON_REQUEST_ID_REUSED

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"the request id {request_id[:128]!r} is booked with other content",
            field="request_id",
            advice="Choose another id, or leave it empty to have one made.",
        )


class SessionLost(KvRouterError):
    """The session is unknown or has ended."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    reason = ErrorReason.ERROR_REASON_SESSION_LOST

    def __init__(self, session_id: str) -> None:
        super().__init__(
            f"the session {session_id[:128]!r} is unknown or has ended",
            field="session_id",
            advice="Open another session and re-assert the live bookings.",
        )


class DeadlineExceeded(KvRouterError):
    """The deadline cannot be met, or has passed."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = ErrorReason.ERROR_REASON_DEADLINE

    def __init__(self, message: str = "the deadline has passed") -> None:
        super().__init__(message, advice="Allow the call more time.")


class Draining(KvRouterError):
    """The service is stopping."""

    status = grpc.StatusCode.UNAVAILABLE
    reason = ErrorReason.ERROR_REASON_DRAINING

    def __init__(self, message: str = "the service is stopping") -> None:
        super().__init__(message, advice="Use another replica.", retry_after_ms=0, retry_elsewhere=True)


class DependencyAway(KvRouterError):
    """A peer that the service needs is away. Also what a stub raises for a service that is out of reach."""

    status = grpc.StatusCode.UNAVAILABLE
    reason = ErrorReason.ERROR_REASON_DEPENDENCY_AWAY

    def __init__(self, message: str, *, retry_after_ms: int = 500) -> None:
        super().__init__(
            message, advice="Retry after the given time.", retry_after_ms=retry_after_ms, retry_elsewhere=True
        )


class OutOfRange(KvRouterError):
    """What was asked for is no longer held, or not yet there."""

    status = grpc.StatusCode.OUT_OF_RANGE


class Unimplemented(KvRouterError):
    """The service does not offer the method."""

    status = grpc.StatusCode.UNIMPLEMENTED


class TooLarge(KvRouterError):
    """A message, or the number of calls under way, is over the limit of the service."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class Internal(KvRouterError):
    """The service failed in a way that it does not explain; its log does."""

    status = grpc.StatusCode.INTERNAL


_BY_REASON: dict[int, type[KvRouterError]] = {
    kind.reason: kind for kind in KvRouterError.__subclasses__() if kind.reason != ErrorReason.ERROR_REASON_UNSPECIFIED
}
_BY_CODE: dict[grpc.StatusCode, type[KvRouterError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: BadRequest,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: DependencyAway,
    grpc.StatusCode.OUT_OF_RANGE: OutOfRange,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
    grpc.StatusCode.RESOURCE_EXHAUSTED: TooLarge,
    grpc.StatusCode.INTERNAL: Internal,
    grpc.StatusCode.NOT_FOUND: NotFound,
}
"""Classes for answers without a typed detail, such as those that gRPC itself gives."""


def to_parts(error: KvRouterError) -> tuple[int, str, ErrorInfo]:
    """Number of the gRPC code, message and detail: the error inside another message."""
    return error.code.value[0], error.message[:_MAX_TEXT], error.info


def from_parts(code: int, message: str, info: ErrorInfo | None = None) -> KvRouterError:
    """The error that ``to_parts`` took apart. An unknown code or reason gives a plain ``KvRouterError``."""
    status = _CODES.get(code, grpc.StatusCode.UNKNOWN)
    info = info if info is not None else ErrorInfo()
    kind = _BY_REASON.get(info.reason)
    if kind is None:
        kind = _BY_CODE.get(status, KvRouterError)
    return kind._restored(status, message, info)


def to_status(error: KvRouterError) -> status_pb2.Status:
    """The error as google.rpc.Status."""
    code, message, info = to_parts(error)
    status = status_pb2.Status(code=code, message=message)
    status.details.add().Pack(info)
    if info.HasField("retry_after_ms"):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(info.retry_after_ms)
        status.details.add().Pack(retry)
    return status


def from_rpc_error(error: grpc.aio.AioRpcError) -> KvRouterError:
    """The error that a service raised, out of what its stub received."""
    code: int = error.code().value[0]
    message = error.details() or error.code().name
    return from_parts(code, message, _info_of(error))


def _info_of(error: grpc.aio.AioRpcError) -> ErrorInfo | None:
    for key, value in error.trailing_metadata() or ():
        if key != STATUS_KEY or not isinstance(value, bytes):
            continue
        try:
            status = status_pb2.Status.FromString(value)
            info = ErrorInfo()
            for detail in status.details:
                if detail.Unpack(info):
                    return info
        except DecodeError:
            return None
    return None
