"""Exceptions that the SDK raises to an engine author."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import grpc
from kvrouter.core.interface import EventsGone, InvalidEvent, PublisherError, UnknownParent
from kvrouter.net.calls import CallRefused
from kvrouter.v1.errors_pb2 import ErrorInfo, ErrorReason

__all__ = [
    "DescriptorMismatch",
    "EventsGone",
    "InvalidConfig",
    "InvalidEvent",
    "InvalidLoad",
    "PublisherError",
    "RequestRefused",
    "UnknownParent",
    "UnknownRank",
]


class InvalidConfig(PublisherError, ValueError):
    """A setting of the worker is out of range; the message names it."""


class InvalidLoad(PublisherError, ValueError):
    """The engine's ``load`` returned something other than load reports; the message says what."""


class UnknownRank(PublisherError, KeyError):
    """The worker has no such data-parallel rank."""

    def __init__(self, dp_rank: object, known: Iterable[int]) -> None:
        super().__init__(f"expected one of this worker's ranks {sorted(known)}, received {dp_rank!r}")

    def __str__(self) -> str:
        return str(self.args[0])


class DescriptorMismatch(PublisherError):
    """The worker's properties differ from its component's descriptor, so it was refused."""

    def __init__(self, component: str, differences: Mapping[str, tuple[object, object]]) -> None:
        """``differences`` maps a field to (the component's value, the worker's value)."""
        reported = "; ".join(
            f"{field}: expected {theirs!r}, this worker has {ours!r}" for field, (theirs, ours) in differences.items()
        )
        super().__init__(
            f"this worker does not match component {component}: {reported}. Correct the worker, choose another "
            f"component, or, if no worker of the component runs any more, delete its descriptor with "
            f"`kvrouter component forget {component}`"
        )
        self.differences = dict(differences)


class RequestRefused(PublisherError):
    """An engine cannot serve a request. Raise it in ``generate``; the caller receives its code and details."""

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT,
        reason: ErrorReason = ErrorReason.ERROR_REASON_BAD_REQUEST,
        field: str = "",
        advice: str = "",
        known: Iterable[object] = (),
        retry_elsewhere: bool = False,
    ) -> None:
        """Describes the refusal.

        Args:
            message: What was expected and what was received.
            code: gRPC status code.
            reason: Machine-readable reason.
            field: Path of the invalid request field; empty if no field is at fault.
            advice: What the caller should do.
            known: Valid values of the field; the first 16 are sent.
            retry_elsewhere: Whether another worker may serve the request.
        """
        super().__init__(message)
        self.code = code
        self.info = ErrorInfo(
            reason=reason,
            advice=advice,
            field=field,
            known_values=[str(value) for value in known][:16],
            retry_elsewhere=retry_elsewhere,
        )

    def to_call_error(self) -> CallRefused:
        """Returns the same refusal as an error of a call."""
        return CallRefused(self.code, str(self), self.info)
