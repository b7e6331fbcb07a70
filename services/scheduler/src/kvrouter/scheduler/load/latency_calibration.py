"""How fast the engines of a component are against a forecast of time to first token.

    pace *= clamp(actual / forecast, 1/4, 4) ^ STEP         at each first token that is fit for it

One factor for all ranks. Learned for each rank it does well while they are idle, and collapses past the knee: a rank
that is slow because it is full is avoided, then never measured again.
"""

from __future__ import annotations

from collections.abc import Hashable

STEP = 0.02
"""Share of the difference, in its logarithm, that one first token corrects: some 50 of them make a new pace."""

WIDEST = 4.0
"""A single first token counts as at most so many times late or early."""

MAX_EXPECTED = 1 << 16
"""Forecasts that wait for their first token; the oldest go."""


class LatencyCalibration:
    """Learns the factor. Pure: it is handed every event, with its time in seconds."""

    def __init__(self) -> None:
        self.value = 1.0
        """Actual time over forecast."""
        self._expected: dict[Hashable, tuple[float, float]] = {}

    def expect(self, key: Hashable, forecast_ms: float, now: float) -> None:
        """A request is sent, and should get its first token in so many ms."""
        if len(self._expected) >= MAX_EXPECTED:
            del self._expected[next(iter(self._expected))]
        self._expected[key] = (forecast_ms, now)

    def first_token(self, key: Hashable, now: float) -> None:
        """It has come."""
        expected = self._expected.pop(key, None)
        if expected is None or expected[0] <= 0:
            return
        ratio = (now - expected[1]) * 1e3 / expected[0]
        self.value *= min(max(ratio, 1 / WIDEST), WIDEST) ** STEP

    def forget(self, key: Hashable) -> None:
        """It ended without."""
        self._expected.pop(key, None)
