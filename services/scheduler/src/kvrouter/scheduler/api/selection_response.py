"""Builds the response to a selection."""

from __future__ import annotations

from kvrouter.scheduler.identifiers import component_message, rank_message
from kvrouter.scheduler.overlap.indexer_query import Overlaps
from kvrouter.scheduler.routing.decision import Decision
from kvrouter.v1.scheduler_pb2 import SelectWorkerResponse


def selection_response(decision: Decision, overlaps: Overlaps) -> SelectWorkerResponse:
    """Returns the response for a decision that was made from ``overlaps``."""
    candidate = decision.candidate
    return SelectWorkerResponse(
        rank=rank_message(candidate.rank),
        endpoint=candidate.endpoint,
        overlap_blocks=decision.overlap_blocks,
        prompt_blocks=decision.prompt_blocks,
        decision_id=decision.decision_id,
        load_only=decision.load_only,
        component=component_message(decision.component),
        mode=decision.mode,
        queued_us=int(decision.queued_seconds * 1e6),
        role=candidate.role,
        cursor=overlaps.cursor(candidate.rank),
    )
