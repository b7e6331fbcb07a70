"""Where the share of requests within their objectives falls below 90%."""

from __future__ import annotations

import math

import pytest
from kvrouter.simulator.results.knee import knee


@pytest.mark.parametrize(
    ("points", "load"),
    [
        ([(1, 1.0), (2, 0.8)], 1.5),
        ([(1, 1.0), (2, 0.95), (4, 0.85), (5, 0.1)], 3.0),
        ([(1, 0.95), (2, 0.9)], math.inf),
        ([(1, 0.9), (2, 0.0)], 1.0),
        ([(1, 0.89), (2, 0.95)], -math.inf),
        ([(1, 1.0)], math.inf),
    ],
)
def test_it_lies_between_the_loads_that_were_run(points: list[tuple[float, float]], load: float) -> None:
    assert knee(points) == pytest.approx(load)
