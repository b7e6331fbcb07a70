"""What goes wrong in the hands of an engine author, by kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import grpc
from kvrouter.v1.errors_pb2 import ErrorInfo, ErrorReason


class PublisherError(Exception):
    """Root of the SDK's own errors."""


class InvalidConfig(PublisherError, ValueError):
    """A setting of the worker is out of range; the message names it."""


class InvalidEvent(PublisherError, ValueError):
    """A report of stored or removed blocks contradicts itself. Nothing of it was recorded or published."""


class UnknownParent(InvalidEvent):
    """Blocks were stored below a parent that the rank does not hold. Nothing was recorded or published."""

    def __init__(self, parent: int) -> None:
        super().__init__(f"the parent {parent:#018x} is not held; report it as stored before its children")
        self.parent = parent


class UnknownRank(PublisherError, KeyError):
    """The worker has no such data parallel rank."""

    def __init__(self, dp_rank: int, known: Iterable[int]) -> None:
        super().__init__(f"rank {dp_rank} is not one of this worker's: {sorted(known)}")

    def __str__(self) -> str:
        return str(self.args[0])


class DescriptorMismatch(PublisherError):
    """The worker differs from the component that it would join, and was refused."""

    def __init__(self, component: str, differences: Mapping[str, tuple[object, object]]) -> None:
        """``differences`` maps a field to (the component's value, the worker's value)."""
        reported = "; ".join(
            f"{field}: {theirs!r} there, {ours!r} here" for field, (theirs, ours) in differences.items()
        )
        super().__init__(
            f"this worker does not fit the component {component}: {reported}. Correct the worker, give it a component "
            f"of its own, or, once no worker of the component runs, remove the component with "
            f"`kvrouter component forget {component}`"
        )
        self.differences = dict(differences)


class EventsGone(PublisherError):
    """Events that were asked for are no longer held, or not yet there: ask for the rank's state instead."""


class RequestRefused(PublisherError):
    """A request cannot be served as it is. Engines raise it from ``generate``; the caller gets code and detail."""

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
        """``field`` is the request's field at fault, ``known`` are values that would have been right."""
        super().__init__(message)
        self.code = code
        self.info = ErrorInfo(
            reason=reason,
            advice=advice,
            field=field,
            known_values=[str(value) for value in known][:16],
            retry_elsewhere=retry_elsewhere,
        )
