"""Errors of a call: one class for each reason of the contract, used by services, the publisher SDK and clients.

``kvrouter.v1.error_encoding`` encodes them for gRPC. A stub raises the class of the reason again, so an object in the
same process and a remote one fail alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, ClassVar, Self

from grpc import StatusCode
from kvrouter.v1.errors_pb2 import ErrorInfo, ErrorReason

_MAX_KNOWN_VALUES = 16
MAX_TEXT = 512
"""Maximum number of characters of a message or value, because trailing metadata must fit into 8 KiB."""
_MAX_NAME = 128
"""Maximum number of characters of a name."""

CLASSES: dict[int, type[KvRouterError]] = {}
"""Class of each reason."""


class KvRouterError(Exception):
    """A failed call. Its text names the fault and the remedy, without prompt tokens.

    A subclass passes the defaults of its errors as arguments of the class.
    """

    code: StatusCode = StatusCode.UNKNOWN
    """gRPC status code."""
    info: ErrorInfo
    """Typed details."""

    default_message: ClassVar[str] = ""
    """Message of an error raised without one."""
    defaults: ClassVar[ErrorInfo] = ErrorInfo()
    """Reason, advice and time of a retry unless an error has its own."""

    def __init_subclass__(
        cls,
        *,
        code: StatusCode | None = None,
        reason: str = "",
        message: str = "",
        advice: str = "",
        retry_after_ms: int | None = None,
        retry_elsewhere: bool = False,
        **options: Any,
    ) -> None:
        super().__init_subclass__(**options)
        if code is None:
            return
        cls.code = code
        cls.default_message = message
        cls.defaults = ErrorInfo(
            reason=f"ERROR_REASON_{reason or 'UNSPECIFIED'}",
            advice=advice,
            retry_after_ms=retry_after_ms,
            retry_elsewhere=retry_elsewhere,
        )
        if reason:
            CLASSES[cls.defaults.reason] = cls

    def __init__(
        self,
        message: str = "",
        retry_after_ms: int | None = None,
        *,
        code: StatusCode | None = None,
        reason: ErrorReason | None = None,
        advice: str = "",
        field: str = "",
        known: Iterable[object] = (),
        retry_elsewhere: bool = False,
        resource_name: object = "",
    ) -> None:
        """Creates the error. Arguments left out have the values of the class.

        Args:
            message: The expected and the received.
            retry_after_ms: Time after which a retry may succeed, milliseconds.
            code: gRPC status code.
            reason: Reason of the contract.
            advice: The remedy for the caller.
            field: Path of the field at fault, such as ``stop_conditions.max_tokens``.
            known: Valid values of the field; the first 16 are sent.
            retry_elsewhere: Whether another replica may serve the same call.
            resource_name: Name of a missing or conflicting resource.
        """
        super().__init__(message or self.default_message)
        if code is not None:
            self.code = code
        self.info = ErrorInfo()
        self.info.CopyFrom(self.defaults)
        self.info.MergeFrom(
            ErrorInfo(
                advice=advice[:MAX_TEXT],
                field=field[:MAX_TEXT],
                known_values=[str(each)[:_MAX_NAME] for each in islice(known, _MAX_KNOWN_VALUES)],
                retry_after_ms=retry_after_ms,
                retry_elsewhere=retry_elsewhere,
                resource_name=str(resource_name)[:_MAX_NAME],
            )
        )
        if reason is not None:
            self.info.reason = reason

    @classmethod
    def restored(cls, message: str, code: StatusCode, info: ErrorInfo) -> Self:
        """Returns the error of another process."""
        error = cls.__new__(cls, message)
        error.code, error.info = code, info
        return error

    def __str__(self) -> str:
        return f"{self.message}. {self.info.advice}" if self.info.advice else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Not by the constructor, whose parameters differ between the classes.
        return type(self).restored, (self.message, self.code, self.info), self.__dict__

    @property
    def message(self) -> str:
        """The fault, without the advice."""
        return str(self.args[0])

    @property
    def reason(self) -> str:
        """Name of the ``kvrouter.v1.ErrorReason`` without prefix, such as ``ALL_BUSY``; ``UNSPECIFIED`` for none."""
        # A newer service may send a reason that this contract does not name.
        known = self.info.reason in ErrorReason.values()
        return ErrorReason.Name(self.info.reason).removeprefix("ERROR_REASON_") if known else str(self.info.reason)

    @property
    def advice(self) -> str:
        """The remedy; empty for none."""
        return self.info.advice

    @property
    def field(self) -> str:
        """Path of the field at fault, such as ``stop_conditions.max_tokens``; empty for none."""
        return self.info.field

    @property
    def known_values(self) -> tuple[str, ...]:
        """Values that would have been valid."""
        return tuple(self.info.known_values)

    @property
    def retry_after(self) -> float | None:
        """Seconds after which a retry may succeed; None if a retry of the same request cannot."""
        return self.info.retry_after_ms / 1000 if "retry_after_ms" in self.info else None

    @property
    def retry_elsewhere(self) -> bool:
        """Whether the same call may succeed at another replica."""
        return self.info.retry_elsewhere

    def untraced(self) -> Self:
        """Returns an equal error without traceback and context, to be raised where this one is stored.

        A traceback refers to its frames, and so to the messages in them. If such a frame also stores the error, only
        the cyclic garbage collector frees both, and hundreds of requests may accumulate.
        """
        copy = self.restored(self.message, self.code, self.info)
        copy.__dict__.update(self.__dict__)
        return copy

    def after(self, earlier: str) -> Self:
        """Returns the same error with an earlier failure in its message."""
        copy = self.untraced()
        copy.args = (f"{self.message}; earlier failure: {earlier}",)
        return copy


class BadRequest(KvRouterError, code=StatusCode.INVALID_ARGUMENT, reason="BAD_REQUEST"):
    """A field of the request is malformed or out of range."""


class UnknownModel(KvRouterError, code=StatusCode.NOT_FOUND, reason="UNKNOWN_MODEL"):
    """No component serves the model."""

    def __init__(self, model: str, known: Iterable[str] = (), only: str = "") -> None:
        """Creates the error.

        Args:
            model: Name of the model.
            known: Models served.
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


class BlockSizeMismatch(KvRouterError, code=StatusCode.INVALID_ARGUMENT, reason="BLOCK_SIZE_MISMATCH"):
    """The block size differs from the component's."""

    def __init__(self, got: int, expected: int) -> None:
        super().__init__(
            f"expected the component's block size {expected}, received {got}",
            field="block_size",
            advice=f"Hash the prompt in blocks of {expected} tokens.",
            known=[expected],
        )


class PromptTooLong(KvRouterError, code=StatusCode.INVALID_ARGUMENT, reason="PROMPT_TOO_LONG"):
    """The prompt, or the prompt with its output, exceeds the model's context length or an operator's limit.

    Clients of the OpenAI API recognise an overflow by words of these messages: LiteLLM by the first ones, LangChain by
    "prompt is too long" or "Input tokens exceed the configured limit".
    """

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
            output_tokens: Number of output tokens requested, at least 1.
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


class UnknownWorker(KvRouterError, code=StatusCode.NOT_FOUND, reason="UNKNOWN_WORKER"):
    """The worker or rank a request names is not registered."""

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


class NotFound(KvRouterError, code=StatusCode.NOT_FOUND):
    """The named object does not exist."""


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


class NoWorkers(
    KvRouterError,
    code=StatusCode.UNAVAILABLE,
    reason="NO_WORKERS",
    advice="Start a suitable worker, or retry after the given time.",
    retry_after_ms=1000,
):
    """The component has no worker that is eligible for the request.

    ``resource_name`` is the component if it has no worker for any request.
    """


class AllBusy(
    KvRouterError,
    code=StatusCode.RESOURCE_EXHAUSTED,
    reason="ALL_BUSY",
    message="every eligible worker is busy",
    advice="Retry after the given time.",
):
    """Every eligible worker is busy."""

    def __init__(self, retry_after_ms: int, message: str = "") -> None:
        super().__init__(message, retry_after_ms)


class NotReady(
    KvRouterError,
    code=StatusCode.UNAVAILABLE,
    reason="NOT_READY",
    advice="Retry after the given time, or at another replica.",
    retry_after_ms=500,
    retry_elsewhere=True,
):
    """The service has not restored its state yet."""


class WorkerLost(
    KvRouterError, code=StatusCode.UNAVAILABLE, reason="WORKER_LOST", advice="Send the request again.", retry_after_ms=0
):
    """The worker failed or disconnected while it served the request."""

    worker_id: int = 0
    """The worker; 0 if the error was received over gRPC."""

    def __init__(self, worker_id: int, message: str) -> None:
        super().__init__(message)
        self.worker_id = worker_id


class PoisonPrompt(
    KvRouterError,
    code=StatusCode.FAILED_PRECONDITION,
    reason="POISON_PROMPT",
    advice="Do not send it again; report it to the operator, whose log has the workers.",
):
    """Workers died while they ran the request, or its tenant's requests with the same prompt."""


class RequestIdReused(KvRouterError, code=StatusCode.ALREADY_EXISTS, reason="REQUEST_ID_REUSED"):
    """The request id is booked with other content."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"the request id {request_id[:128]!r} is already booked with other content",
            field="request_id",
            advice="Choose another id, or leave it empty to have one generated.",
            resource_name=request_id,
        )


class SessionLost(KvRouterError, code=StatusCode.FAILED_PRECONDITION, reason="SESSION_LOST"):
    """The session is unknown or has ended."""

    def __init__(self, session_id: str) -> None:
        super().__init__(
            f"the session {session_id[:128]!r} is unknown or has ended",
            field="session_id",
            advice="Open a session and re-assert the live bookings.",
            resource_name=session_id,
        )


class DeadlineExceeded(
    KvRouterError,
    code=StatusCode.DEADLINE_EXCEEDED,
    reason="DEADLINE",
    message="the deadline has passed",
    advice="Set a longer deadline.",
):
    """The deadline cannot be met, or has passed."""


class Draining(
    KvRouterError,
    code=StatusCode.UNAVAILABLE,
    reason="DRAINING",
    message="the service is stopping",
    advice="Use another replica.",
    retry_after_ms=0,
    retry_elsewhere=True,
):
    """The service is stopping."""


class DependencyAway(
    KvRouterError,
    code=StatusCode.UNAVAILABLE,
    reason="DEPENDENCY_AWAY",
    advice="Retry after the given time.",
    retry_after_ms=500,
    retry_elsewhere=True,
):
    """A dependency of the service is away. A stub also raises it if the service cannot be reached."""


class OutOfRange(KvRouterError, code=StatusCode.OUT_OF_RANGE):
    """Requested events are no longer stored or do not exist yet."""


class Unimplemented(KvRouterError, code=StatusCode.UNIMPLEMENTED):
    """The service does not implement the method."""


class TooLarge(KvRouterError, code=StatusCode.RESOURCE_EXHAUSTED):
    """A message, or the number of running calls, exceeds the service's limit."""


class TooMuchUnread(
    KvRouterError,
    code=StatusCode.RESOURCE_EXHAUSTED,
    reason="TOO_MUCH_UNREAD",
    advice="Read the output as fast as it is produced.",
):
    """More of a call's output waited to be read than its bound allows."""


class Unauthenticated(
    KvRouterError,
    code=StatusCode.UNAUTHENTICATED,
    reason="UNAUTHENTICATED",
    advice="Send a valid API key or token, as `Authorization: Bearer ...`.",
):
    """The call has no valid credential."""


class PermissionDenied(
    KvRouterError,
    code=StatusCode.PERMISSION_DENIED,
    reason="PERMISSION_DENIED",
    advice="Use a key that has this permission.",
):
    """The caller lacks the permission."""


class ServiceRefused(KvRouterError, code=StatusCode.UNAVAILABLE, reason="SERVICE_REFUSED"):
    """Another service does not admit this process. For this process's own callers, that service is unavailable."""


class RateLimited(
    KvRouterError,
    code=StatusCode.RESOURCE_EXHAUSTED,
    reason="RATE_LIMITED",
    advice="Retry after the given time.",
):
    """The caller exceeded a limit of its key or tenant."""

    def __init__(self, message: str, retry_after_ms: int) -> None:
        super().__init__(message, retry_after_ms)


class Overloaded(
    KvRouterError,
    code=StatusCode.RESOURCE_EXHAUSTED,
    reason="OVERLOADED",
    advice="Retry after the given time.",
):
    """The service has more work than it can finish in time."""

    def __init__(self, message: str, retry_after_ms: int) -> None:
        super().__init__(message, retry_after_ms)


class Internal(KvRouterError, code=StatusCode.INTERNAL):
    """The service failed unexpectedly; its log has the cause."""


INTERNAL_ERROR = Internal("internal error", advice="The service's log has the cause.")
"""The error a caller receives for a defect."""
