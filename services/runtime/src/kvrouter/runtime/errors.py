"""Typed errors of the services, and their encoding in gRPC.

Over gRPC an error is a status code with a ``google.rpc.Status`` that contains ``kvrouter.v1.ErrorInfo`` and the
standard details (``kvrouter.net.grpc_status``). The stub raises the same class again, so that a caller handles an
object in its own process and a remote one alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Self

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from kvrouter.net.calls import CallError, CallRefused, CallTimedOut
from kvrouter.net.grpc_status import STATUS_KEY, error_status, with_advice, without_advice
from kvrouter.v1.errors_pb2 import ErrorInfo, ErrorReason

_MAX_KNOWN_VALUES = 16
_MAX_TEXT = 512
"""Maximum number of characters of a message or value, because trailing metadata must fit into 8 KiB."""
_MAX_NAME = 128
"""Maximum number of characters of a name."""

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class KvRouterError(Exception):
    """A failed call. The message says what is wrong, ``info.advice`` what to do. Neither contains prompt tokens."""

    status: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    reason: ClassVar[ErrorReason] = ErrorReason.ERROR_REASON_UNSPECIFIED

    code: grpc.StatusCode
    """gRPC status code."""
    info: ErrorInfo
    """Typed details."""

    def __init__(
        self,
        message: str,
        *,
        advice: str = "",
        field: str = "",
        known: Iterable[object] = (),
        retry_after_ms: int | None = None,
        retry_elsewhere: bool = False,
        resource_name: object = "",
    ) -> None:
        super().__init__(message)
        self.code = self.status
        self.info = ErrorInfo(
            reason=self.reason,
            advice=advice[:_MAX_TEXT],
            field=field[:_MAX_TEXT],
            known_values=[str(value)[:_MAX_NAME] for value, _ in zip(known, range(_MAX_KNOWN_VALUES), strict=False)],
            retry_after_ms=retry_after_ms,
            retry_elsewhere=retry_elsewhere,
            resource_name=str(resource_name)[:_MAX_NAME],
        )

    @property
    def message(self) -> str:
        """What is wrong."""
        return str(self)

    @property
    def shown_message(self) -> str:
        """What is wrong and what to do, as clients show it."""
        return with_advice(str(self), self.info)

    def untraced(self) -> Self:
        """Returns an equal error without traceback and context, to be raised where this one is stored.

        A traceback refers to its frames, and so to the messages in them. If such a frame also stores the error, only
        the cyclic garbage collector frees both, and hundreds of requests may accumulate.
        """
        copy = type(self)._restored(self.code, str(self), self.info)
        copy.__dict__.update(self.__dict__)
        return copy

    def after(self, earlier: str) -> KvRouterError:
        """Returns the same error with an earlier failure in its message."""
        return self._restored(self.code, f"{self}; earlier failure: {earlier}", self.info)

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

    def __init__(self, model: str, known: Iterable[str] = (), only: str = "") -> None:
        """Creates the error.

        Args:
            model: Name of the model.
            known: Models that are served.
            only: Role of the workers that serve the model, if there are some and none can serve the request's stage.
        """
        self.only = only
        models = sorted(known)
        advice = f"Use one of: {', '.join(models[:_MAX_KNOWN_VALUES])}." if models else "Start a worker that serves it."
        message = f"The model {model[:128]!r} does not exist: no component serves it"
        if only:
            advice = "Start a worker of another role for it."
            message = f"only {only} workers serve the model {model[:128]!r}"
        super().__init__(message, field="model", advice=advice, known=models, resource_name=model)


class BlockSizeMismatch(KvRouterError):
    """The block size differs from the component's."""

    status = grpc.StatusCode.INVALID_ARGUMENT
    reason = ErrorReason.ERROR_REASON_BLOCK_SIZE_MISMATCH

    def __init__(self, got: int, expected: int) -> None:
        super().__init__(
            f"expected the component's block size {expected}, received {got}",
            field="block_size",
            advice=f"Hash the prompt in blocks of {expected} tokens.",
            known=[expected],
        )


class PromptTooLong(KvRouterError):
    """The prompt, or the prompt with its output, exceeds the model's context length or an operator's limit.

    Clients of the OpenAI API recognise an overflow by words of these messages: LiteLLM by the first ones, LangChain by
    "prompt is too long" or "Input tokens exceed the configured limit".
    """

    status = grpc.StatusCode.INVALID_ARGUMENT
    reason = ErrorReason.ERROR_REASON_PROMPT_TOO_LONG

    tokens: int = 0
    """Number of prompt tokens; the least number if counting stopped early, 0 if the error was received over gRPC."""

    def __init__(self, tokens: int, limit: int, *, field: str = "token_ids") -> None:
        """Creates the error for an operator's limit of prompt tokens."""
        super().__init__(
            f"Input tokens exceed the configured limit of {limit} tokens: the prompt has {tokens}",
            field=field,
            advice=f"Send at most {limit} tokens.",
            known=[limit],
        )
        self.tokens = tokens

    @classmethod
    def for_model(cls, tokens: int, context_length: int, *, field: str = "token_ids", output_tokens: int = 1) -> Self:
        """Returns the error for a model's context length, which has to hold prompt and output.

        Args:
            tokens: Number of prompt tokens, or the least number if counting stopped early.
            context_length: Context length of the model, tokens.
            field: The field to correct.
            output_tokens: Number of output tokens that were requested, at least 1.
        """
        most = context_length - (tokens if tokens < context_length else 1)
        error = cls(tokens, most, field=field)
        error.args = (
            f"This model's maximum context length is {context_length} tokens. However, you requested "
            f"{tokens + output_tokens} tokens: {tokens} in the prompt, {output_tokens} in the output. "
            "The prompt is too long for that",
        )
        if tokens < context_length:
            error.info.advice = f"Set max_tokens to at most {most}, or shorten the prompt."
        return error


class UnknownWorker(KvRouterError):
    """The worker or rank that a request names is not registered."""

    status = grpc.StatusCode.NOT_FOUND
    reason = ErrorReason.ERROR_REASON_UNKNOWN_WORKER

    def __init__(
        self, worker_id: int, known: Iterable[int] = (), *, dp_rank: int | None = None, component: object = None
    ) -> None:
        """``known`` are the workers of the component, which may be named: others may have that worker."""
        workers, where = sorted(known), "" if component is None else f" in {component}"
        named = f"worker {worker_id}" if dp_rank is None else f"rank {dp_rank} of worker {worker_id}"
        advice = f"Use one of: {', '.join(map(str, workers[:_MAX_KNOWN_VALUES]))}." if workers else "Start a worker."
        super().__init__(
            f"{named} is not registered{where}",
            field="constraints.worker_id",
            advice=advice,
            known=workers,
            resource_name=worker_id if dp_rank is None else f"{worker_id}:{dp_rank}",
        )


class NotFound(KvRouterError):
    """The named object does not exist."""

    status = grpc.StatusCode.NOT_FOUND


class UnknownComponent(NotFound):
    """No component has that name. A stub raises it as ``NotFound``."""

    def __init__(self, component: object, known: Iterable[object] = ()) -> None:
        components = sorted(map(str, known))
        advice = f"Use one of: {', '.join(components[:_MAX_KNOWN_VALUES])}." if components else "Start a worker in it."
        super().__init__(
            f"no component is named {str(component)[:160]!r}",
            field="component",
            advice=advice,
            known=components,
            resource_name=component,
        )


class NoWorkers(KvRouterError):
    """The component has no worker that is eligible for the request."""

    status = grpc.StatusCode.UNAVAILABLE
    reason = ErrorReason.ERROR_REASON_NO_WORKERS

    def __init__(self, message: str, *, retry_after_ms: int = 1000) -> None:
        super().__init__(
            message, advice="Start a suitable worker, or retry after the given time.", retry_after_ms=retry_after_ms
        )


class AllBusy(KvRouterError):
    """Every eligible worker is busy."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = ErrorReason.ERROR_REASON_ALL_BUSY

    def __init__(self, retry_after_ms: int, message: str = "every eligible worker is busy") -> None:
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
    """The worker failed or disconnected while it served the request."""

    status = grpc.StatusCode.UNAVAILABLE
    reason = ErrorReason.ERROR_REASON_WORKER_LOST

    worker_id: int = 0
    """The worker; 0 if the error was received over gRPC."""

    def __init__(self, worker_id: int, message: str) -> None:
        super().__init__(message, advice="Send the request again.", retry_after_ms=0)
        self.worker_id = worker_id


class PoisonPrompt(KvRouterError):
    """Workers died while they ran the request, or its tenant's requests with the same prompt."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    reason = ErrorReason.ERROR_REASON_POISON_PROMPT

    def __init__(self, message: str) -> None:
        super().__init__(message, advice="Do not send it again; report it to the operator, whose log has the workers.")


class RequestIdReused(KvRouterError):
    """The request id is booked with other content."""

    status = grpc.StatusCode.ALREADY_EXISTS
    reason = ErrorReason.ERROR_REASON_REQUEST_ID_REUSED

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"the request id {request_id[:128]!r} is already booked with other content",
            field="request_id",
            advice="Choose another id, or leave it empty to have one generated.",
            resource_name=request_id,
        )


class SessionLost(KvRouterError):
    """The session is unknown or has ended."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    reason = ErrorReason.ERROR_REASON_SESSION_LOST

    def __init__(self, session_id: str) -> None:
        super().__init__(
            f"the session {session_id[:128]!r} is unknown or has ended",
            field="session_id",
            advice="Open a session and re-assert the live bookings.",
            resource_name=session_id,
        )


class DeadlineExceeded(KvRouterError):
    """The deadline cannot be met, or has passed."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = ErrorReason.ERROR_REASON_DEADLINE

    def __init__(self, message: str = "the deadline has passed") -> None:
        super().__init__(message, advice="Set a longer deadline.")


class Draining(KvRouterError):
    """The service is stopping."""

    status = grpc.StatusCode.UNAVAILABLE
    reason = ErrorReason.ERROR_REASON_DRAINING

    def __init__(self, message: str = "the service is stopping") -> None:
        super().__init__(message, advice="Use another replica.", retry_after_ms=0, retry_elsewhere=True)


class DependencyAway(KvRouterError):
    """A dependency of the service is away. A stub also raises it if the service cannot be reached."""

    status = grpc.StatusCode.UNAVAILABLE
    reason = ErrorReason.ERROR_REASON_DEPENDENCY_AWAY

    def __init__(self, message: str, *, retry_after_ms: int = 500) -> None:
        super().__init__(
            message, advice="Retry after the given time.", retry_after_ms=retry_after_ms, retry_elsewhere=True
        )


class OutOfRange(KvRouterError):
    """Requested events are no longer stored or do not exist yet."""

    status = grpc.StatusCode.OUT_OF_RANGE


class Unimplemented(KvRouterError):
    """The service does not implement the method."""

    status = grpc.StatusCode.UNIMPLEMENTED


class TooLarge(KvRouterError):
    """A message, or the number of running calls, exceeds the service's limit."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class TooMuchUnread(KvRouterError):
    """More of a call's output waited to be read than its bound allows."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = ErrorReason.ERROR_REASON_TOO_MUCH_UNREAD

    def __init__(self, message: str) -> None:
        super().__init__(message, advice="Read the output as fast as it is produced.")


class Unauthenticated(KvRouterError):
    """The call has no valid credential."""

    status = grpc.StatusCode.UNAUTHENTICATED
    reason = ErrorReason.ERROR_REASON_UNAUTHENTICATED

    def __init__(self, message: str) -> None:
        super().__init__(message, advice="Send a valid API key or token, as `Authorization: Bearer ...`.")


class PermissionDenied(KvRouterError):
    """The caller may not do what it requests."""

    status = grpc.StatusCode.PERMISSION_DENIED
    reason = ErrorReason.ERROR_REASON_PERMISSION_DENIED

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        known: Iterable[object] = (),
        advice: str = "Use a key that has this permission.",
    ) -> None:
        super().__init__(message, field=field, advice=advice, known=known)


class ServiceRefused(KvRouterError):
    """Another service does not admit this process. For this process's own callers, that service is unavailable."""

    status = grpc.StatusCode.UNAVAILABLE
    reason = ErrorReason.ERROR_REASON_SERVICE_REFUSED

    @classmethod
    def _restored(cls, code: grpc.StatusCode, message: str, info: ErrorInfo) -> Self:  # noqa: ARG003
        return super()._restored(cls.status, message, info)


class RateLimited(KvRouterError):
    """The caller exceeded a limit of its key or tenant."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = ErrorReason.ERROR_REASON_RATE_LIMITED

    def __init__(self, message: str, retry_after_ms: int) -> None:
        super().__init__(message, advice="Retry after the given time.", retry_after_ms=retry_after_ms)


class Overloaded(KvRouterError):
    """The service has more work than it can finish in time."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = ErrorReason.ERROR_REASON_OVERLOADED

    def __init__(self, message: str, retry_after_ms: int) -> None:
        super().__init__(message, advice="Retry after the given time.", retry_after_ms=retry_after_ms)


class Internal(KvRouterError):
    """The service failed unexpectedly; its log has the cause."""

    status = grpc.StatusCode.INTERNAL


INTERNAL_ERROR = Internal("internal error", advice="The service's log has the cause.")
"""The error that a caller receives for a defect."""


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
"""Classes for errors without typed details, such as those that gRPC itself generates."""


def to_parts(error: KvRouterError) -> tuple[int, str, ErrorInfo]:
    """Returns number of the gRPC code, message and details, to embed the error in another message."""
    return error.code.value[0], error.message[:_MAX_TEXT], error.info


def from_parts(code: int, message: str, info: ErrorInfo | None = None) -> KvRouterError:
    """Restores an error from ``to_parts``. An unknown code or reason gives a plain ``KvRouterError``."""
    status = _CODES.get(code, grpc.StatusCode.UNKNOWN)
    info = info if info is not None else ErrorInfo()
    kind = _BY_REASON.get(info.reason)
    if kind is None:
        kind = _BY_CODE.get(status, KvRouterError)
    return kind._restored(status, message, info)


def to_status(error: KvRouterError) -> status_pb2.Status:
    """Returns the error as google.rpc.Status."""
    return error_status(error.code, error.message[:_MAX_TEXT], error.info)


def to_refusal(error: KvRouterError) -> CallRefused:
    """Returns the error as one of a call on a call stream."""
    return CallRefused(error.code, error.message, error.info)


def from_rpc_error(error: grpc.aio.AioRpcError) -> KvRouterError:
    """Returns the error that the service raised."""
    code: int = error.code().value[0]
    message, info = error.details() or error.code().name, _info_of(error)
    return from_parts(code, message if info is None else without_advice(message, info), info)


def from_call_error(error: CallError) -> KvRouterError:
    """Returns the error of a call on a call stream, as an ordinary call would raise it."""
    if isinstance(error, CallRefused):
        code: int = error.code.value[0]
        return from_parts(code, str(error), error.info)
    if isinstance(error, CallTimedOut):
        return DeadlineExceeded()
    return DependencyAway(str(error))


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
