"""Exceptions that the SDK raises to an engine author."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvrouter.core.interface import EventsGone, InvalidEvent, PublisherError, UnknownParent
from kvrouter.v1.errors import BadRequest

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


class RequestRefused(PublisherError, BadRequest):
    """An engine cannot serve a request. Raise it in ``generate``; the caller receives its code and details."""
