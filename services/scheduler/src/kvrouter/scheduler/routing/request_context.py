"""A request on its way to a decision."""

from __future__ import annotations

from dataclasses import dataclass

from kvrouter.runtime.errors import BadRequest
from kvrouter.scheduler.identifiers import Key
from kvrouter.scheduler.load.pools import Pool
from kvrouter.scheduler.overlap.indexer_query import NOT_QUERIED, Overlaps
from kvrouter.scheduler.request.options import RoutingOptions
from kvrouter.scheduler.request.prompt import Prompt
from kvrouter.scheduler.workers.candidates import WorkerConstraints
from kvrouter.v1.scheduler_pb2 import RoutingRequest

DEFAULT_LEASE_SECONDS = 3600.0
MAX_LEASE_SECONDS = 24 * 3600.0
"""Longest lease: a caller that forgets its bookings does not bind load for ever."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """A request, checked and ready to be decided."""

    pool: Pool
    prompt: Prompt
    constraints: WorkerConstraints
    options: RoutingOptions


@dataclass(slots=True)
class BookingContext:
    """A question with what its booking needs."""

    request_context: RequestContext
    routing: RoutingRequest
    key: Key | None
    """None chooses without booking."""
    session_id: str = ""
    """Session that is to own the booking; empty for a lease."""
    session_token: int | None = None
    """Stream of that session which asks; None outside of a stream."""
    lease_seconds: float = 0.0
    overlaps: Overlaps = NOT_QUERIED
    """What the ranks hold of the prompt; the last answer, where it was asked for again."""


def lease_seconds(lease_ms: int) -> float:
    """The lease that a request asks for, seconds.

    Raises:
        BadRequest: it is too long.
    """
    seconds = lease_ms / 1000 if lease_ms else DEFAULT_LEASE_SECONDS
    if seconds > MAX_LEASE_SECONDS:
        raise BadRequest(
            f"lease_ms is {lease_ms}",
            field="lease_ms",
            advice=f"Send {int(MAX_LEASE_SECONDS * 1000)} at most; calls that name the booking renew it.",
        )
    return seconds
