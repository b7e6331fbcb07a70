"""The answer to a selection."""

from __future__ import annotations

from kvrouter.scheduler.identifiers import component_message, rank_message
from kvrouter.scheduler.routing.choice import Chosen
from kvrouter.scheduler.routing.request_context import BookingContext
from kvrouter.v1.scheduler_pb2 import SelectWorkerResponse


def answer(
    booking_context: BookingContext, chosen: Chosen, decision_id: int, queued_seconds: float
) -> SelectWorkerResponse:
    """What a caller is told of a choice."""
    request_context, candidate = booking_context.request_context, chosen.row.candidate
    pool = request_context.pool
    return SelectWorkerResponse(
        rank=rank_message(candidate.rank),
        endpoint=candidate.endpoint,
        overlap_blocks=chosen.row.overlap_blocks,
        prompt_blocks=request_context.prompt.blocks,
        decision_id=decision_id,
        load_only=bool(booking_context.overlaps.failure),
        component=component_message(pool.name),
        mode=request_context.options.mode,
        queued_us=int(queued_seconds * 1e6),
        role=candidate.role,
        cursor=booking_context.overlaps.cursor(candidate.rank),
    )
