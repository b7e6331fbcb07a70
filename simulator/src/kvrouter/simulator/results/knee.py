"""Finds a policy's knee: the load at which fewer than 90% of the requests meet their objectives.

Between two simulated loads the share of requests is interpolated linearly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

KNEE_SHARE = 0.9
"""Share of requests within their objectives at the knee. Past the knee it falls to a half within a tenth or two of
load, so another share would give nearly the same load."""


def knee(points: Sequence[tuple[float, float]]) -> float:
    """Returns the load of the knee, from (load, share within objectives) in order of load.

    It is infinite if it lies beyond the last load, and minus infinity if it lies before the first.
    """
    if points[0][1] < KNEE_SHARE:
        return -math.inf
    for (load, share), (next_load, next_share) in pairwise(points):
        if next_share < KNEE_SHARE:
            return load + (next_load - load) * (share - KNEE_SHARE) / (share - next_share)
    return math.inf
