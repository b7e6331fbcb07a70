"""Attributes that show a decision in the span of its selection."""

from __future__ import annotations

import numpy as np
from kvrouter.core import Rank
from kvrouter.runtime.tracing import Attribute
from kvrouter.scheduler.routing.decide import Decision

MAX_CANDIDATES = 8
"""Candidates with their costs, the cheapest ones. Explain has all of them."""


def of_decision(decision: Decision) -> dict[str, Attribute]:
    """Returns the decision with the terms of the chosen rank, and the cheapest candidates."""
    attributes: dict[str, Attribute] = {
        "kvrouter.decision_id": str(decision.decision_id),
        "kvrouter.component": str(decision.component),
        "kvrouter.mode": decision.mode,
        "kvrouter.reason": decision.explanation.reason,
        "kvrouter.load_only": decision.load_only,
        "kvrouter.prompt_blocks": decision.prompt_blocks,
        "kvrouter.queued_seconds": decision.queued_seconds,
        "kvrouter.candidates": len(decision.snapshot.worker_set),
    }
    context, explanation = decision.context, decision.explanation
    if context is None or decision.chosen is None:
        return attributes
    chosen = context.ranks.index(decision.chosen)
    attributes["kvrouter.rank"] = _label(decision.chosen)
    attributes["kvrouter.overlap_blocks"] = int(context.overlap_blocks[chosen])
    for name, column in explanation.terms.items():
        attributes[f"kvrouter.terms.{name}"] = float(column[chosen])
    if len(explanation.costs):
        cheapest = np.argsort(explanation.costs, kind="stable")[:MAX_CANDIDATES].tolist()
        attributes["kvrouter.cheapest.ranks"] = [_label(context.ranks[index]) for index in cheapest]
        attributes["kvrouter.cheapest.costs"] = [float(explanation.costs[index]) for index in cheapest]
        attributes["kvrouter.cheapest.overlap_blocks"] = [int(context.overlap_blocks[index]) for index in cheapest]
    return attributes


def _label(rank: Rank) -> str:
    return f"{rank[0]}:{rank[1]}"
