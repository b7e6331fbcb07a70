"""Facts for policies, with defaults for what a test does not care about."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from kvrouter.scheduler.policies.interface import SchedulingContext


def context(count: int, **columns: Any) -> SchedulingContext:
    """Facts of ``count`` candidates, ranks (1, 0), (2, 0) and so on; ``head_prefill_seconds`` count back from now."""
    if "head_prefill_seconds" in columns:
        columns["head_prefill_since"] = [1000.0 - seconds for seconds in columns.pop("head_prefill_seconds")]
    zeros: Sequence[int] = [0] * count
    known: dict[str, Any] = {
        "prompt_tokens": 64,
        "block_size": 16,
        "overlap_score_weight": 1.0,
        "temperature": 0.0,
        "previous": None,
        "ranks": tuple((number, 0) for number in range(1, count + 1)),
        "overlap_blocks": zeros,
        "new_prefill_tokens": zeros,
        "prefill_tokens": zeros,
        "active_blocks": zeros,
        "queued_blocks": zeros,
        "leading_active_blocks": zeros,
        "active_requests": zeros,
        "free_slots": [math.inf] * count,
        "is_kept": [False] * count,
        "total_blocks": zeros,
        "max_batched_tokens": zeros,
        "head_prefill_tokens": zeros,
        "head_prefill_since": [math.inf] * count,
        "now": 1000.0,
        "prefill_requests": zeros,
        "relative_latency": [1.0] * count,
        "reuse_chance": [0.0] * count,
        "latency_calibration": 1.0,
    }
    assert columns.keys() <= known.keys()
    known["free_slots"] = np.array(columns.pop("free_slots", known["free_slots"]), np.float64)
    given = {name: np.array(value) if isinstance(value, list) else value for name, value in (known | columns).items()}
    return SchedulingContext(**(given | {"ranks": tuple((known | columns)["ranks"])}))
