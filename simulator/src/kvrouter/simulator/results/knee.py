"""Where a policy's knee is: the load at which fewer than 90% of the requests keep to their objectives.

Between two loads that were run, the share of requests is taken to fall in a straight line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

KNEE_SHARE = 0.9
"""Share of requests within their objectives. Past the knee it falls to a half within a tenth or two of load, so that
another share would give much the same load."""


def knee(points: Sequence[tuple[float, float]]) -> float:
    """The load of the knee, from (load, share within objectives) in order of load.

    Infinity if it is beyond the last load, minus infinity if it is before the first.
    """
    if points[0][1] < KNEE_SHARE:
        return -math.inf
    for (load, share), (next_load, next_share) in pairwise(points):
        if next_share < KNEE_SHARE:
            return load + (next_load - load) * (share - KNEE_SHARE) / (share - next_share)
    return math.inf
