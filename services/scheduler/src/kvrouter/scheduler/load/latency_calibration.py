"""Calibrates the time model of mode ``forecast`` against the engines of a component.

    value *= clamp(measured / forecast, 1/4, 4) ^ STEP         at each suitable first token

One factor serves all ranks. A factor for each rank fails past the knee: a rank that is slow because it is full would be
avoided, and then never be measured again.
"""

from __future__ import annotations

from collections.abc import Hashable

STEP = 0.02
"""Share of the difference, in its logarithm, that one first token corrects: about 50 first tokens form a new value."""

WIDEST = 4.0
"""Limit of the ratio between measured and forecast time of a single first token."""

MAX_EXPECTED = 1 << 16
"""Forecasts that wait for their first token; beyond it the oldest are dropped."""


class LatencyCalibration:
    """Learns the factor. Pure: every event is passed in with its time in seconds."""

    def __init__(self) -> None:
        self.value = 1.0
        """Measured time over forecast time."""
        self._expected: dict[Hashable, tuple[float, float]] = {}

    def expect(self, key: Hashable, forecast_ms: float, now: float) -> None:
        """Notes that a request was dispatched, with its forecast time to first token in ms."""
        if len(self._expected) >= MAX_EXPECTED:
            del self._expected[next(iter(self._expected))]
        self._expected[key] = (forecast_ms, now)

    def first_token(self, key: Hashable, now: float) -> None:
        """Updates the factor with the first token of a request."""
        expected = self._expected.pop(key, None)
        if expected is None or expected[0] <= 0:
            return
        ratio = (now - expected[1]) * 1e3 / expected[0]
        self.value *= min(max(ratio, 1 / WIDEST), WIDEST) ** STEP

    def forget(self, key: Hashable) -> None:
        """Drops the forecast of a request that ended without a first token."""
        self._expected.pop(key, None)
