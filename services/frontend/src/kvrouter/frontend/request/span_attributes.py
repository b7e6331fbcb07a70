"""Attributes of the spans of a request. They contain no prompt and no output."""

from __future__ import annotations

from kvrouter.frontend.request.progress import Progress
from kvrouter.frontend.schedulers.live_bookings import LiveBooking
from kvrouter.frontend.workers.failures import WorkerFailure
from kvrouter.runtime.tracing import Attribute, Span

GENERATE = "kvrouter.v1.WorkerService/Generate"
"""Name of the span of an attempt."""


def of_request(model: str, request_id: str, prompt_tokens: int) -> dict[str, Attribute]:
    """Returns the attributes of a request."""
    return {
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": prompt_tokens,
        "kvrouter.request_id": request_id,
    }


def describe_attempt(span: Span, booking: LiveBooking, endpoint: str) -> None:
    """Sets where an attempt runs."""
    if span.recording:
        rank = booking.rank
        span.set(
            {
                "server.address": endpoint,
                "kvrouter.rank": f"{rank.worker_id}:{rank.dp_rank}",
                "kvrouter.attempt": booking.key.attempt,
                "kvrouter.predicted_cached_tokens": booking.predicted_cached_tokens,
            }
        )


def describe_outcome(span: Span, progress: Progress, failure: WorkerFailure | None) -> None:
    """Sets how an attempt ended."""
    if not span.recording:
        return
    span.set({"gen_ai.usage.output_tokens": progress.output_tokens})
    if progress.cached_tokens is not None:
        span.set({"kvrouter.cached_tokens": progress.cached_tokens})
    if progress.first_output_unix_ns:
        span.add_event("first_token", progress.first_output_unix_ns)
    if failure is not None:
        span.fail(failure.cause, failure.message)
