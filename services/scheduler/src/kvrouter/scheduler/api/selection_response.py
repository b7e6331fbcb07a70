"""Builds the response to a selection."""

from __future__ import annotations

from functools import lru_cache

from kvrouter.core import Rank
from kvrouter.scheduler.identifiers import component_message, rank_message
from kvrouter.scheduler.overlap.indexer_query import Overlaps
from kvrouter.scheduler.policies.interface import Wait
from kvrouter.scheduler.routing.decide import Decision, prefill_message
from kvrouter.v1.common_pb2 import Role
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import SelectWorkerResponse

_TEMPLATES = 4096
"""Responses to keep encoded: one for each rank and mode in use."""


def selection_response(decision: Decision, overlaps: Overlaps) -> SelectWorkerResponse:
    """Returns the response for a decision that was made from ``overlaps``."""
    candidate = decision.candidate
    # To parse what is the same for each request of a rank takes a fifth of the time of building it from its parts.
    response = SelectWorkerResponse.FromString(
        _template(candidate.rank, candidate.endpoint, candidate.role, decision.component, decision.mode)
    )
    response.overlap_blocks = decision.overlap_blocks
    response.prompt_blocks = decision.prompt_blocks
    response.decision_id = decision.decision_id
    response.load_only = decision.load_only
    response.queued_us = int(decision.queued_seconds * 1e6)
    if (prefill := prefill_message(decision.prefill)) is not None:
        response.prefill.CopyFrom(prefill)
    overlaps.write_cursor(candidate.rank, response)
    return response


def comparison_response(decision: Decision, overlaps: Overlaps, conversation_rank: Rank | None) -> SelectWorkerResponse:
    """Returns the response for a caller that compares components.

    Args:
        decision: The decision in this component.
        overlaps: The overlaps from which it was made.
        conversation_rank: Rank of the conversation's previous request; None without one.
    """
    response = selection_response(decision, overlaps)
    costs = decision.explanation.costs
    if len(costs) and decision.verdict is not None and decision.context is not None:
        tokens = decision.context.block_size if decision.explanation.counts_blocks else 1
        response.cost = float(costs[decision.verdict.index]) * tokens
    response.would_queue = isinstance(decision.verdict, Wait)
    response.keeps_conversation = conversation_rank is not None and decision.rank == conversation_rank
    return response


@lru_cache(maxsize=_TEMPLATES)
def _template(rank: Rank, endpoint: str, role: Role, component: ComponentName, mode: str) -> bytes:
    return SelectWorkerResponse(
        rank=rank_message(rank), endpoint=endpoint, role=role, component=component_message(component), mode=mode
    ).SerializeToString()
