"""Facts for policies, with defaults for what a test does not care about."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from kvrouter.scheduler.policies.interface import SchedulingContext
from kvrouter.scheduler.policies.loads import Loads

_COUNTS = (
    "active_blocks",
    "prefill_tokens",
    "active_requests",
    "leading_active_blocks",
    "head_prefill_tokens",
    "prefill_requests",
)
"""Columns of integers in ``Loads``, in their order."""


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
    given["weighed_tokens"] = np.asarray(given.pop("new_prefill_tokens"), np.int64)
    counts = [np.asarray(given.pop(name), np.int64) for name in _COUNTS]
    since = np.asarray(given.pop("head_prefill_since"), np.float64)
    given["request_limits"] = given.pop("free_slots") + counts[_COUNTS.index("active_requests")]
    loads = Loads(b"".join(column.tobytes() for column in (*counts, since)), given.pop("now"))
    return SchedulingContext(**(given | {"ranks": tuple((known | columns)["ranks"]), "loads": loads}))
