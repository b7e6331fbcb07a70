"""The answer to a selection."""

from __future__ import annotations

from kvrouter.scheduler.identifiers import component_message, rank_message
from kvrouter.scheduler.routing.choice import Chosen
from kvrouter.scheduler.routing.request_context import Asked
from kvrouter.v1.scheduler_pb2 import SelectWorkerResponse


def answer(asked: Asked, chosen: Chosen, decision_id: int, queued_seconds: float) -> SelectWorkerResponse:
    """What a caller is told of a choice."""
    question, candidate = asked.question, chosen.row.candidate
    pool = question.pool
    return SelectWorkerResponse(
        rank=rank_message(candidate.rank),
        endpoint=candidate.endpoint,
        overlap_blocks=chosen.row.overlap_blocks,
        prompt_blocks=question.prompt.blocks,
        decision_id=decision_id,
        load_only=bool(asked.overlaps.failure),
        component=component_message(pool.name),
        mode=question.options.mode,
        queued_us=int(queued_seconds * 1e6),
        role=candidate.role,
        cursor=asked.overlaps.cursor(candidate.rank),
    )
