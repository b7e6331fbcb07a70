"""Calibrates the time model of mode ``forecast`` against the engines of a component.

    value *= clamp(measured / (forecast * relative latency), 1/4, 4) ^ STEP         at each suitable first token

This factor serves all ranks, and forecasts are those at the component's speed. How slow a rank is relative to the
component is learned beside it (``relative_latency``).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from kvrouter.core import Rank
from kvrouter.scheduler.load.relative_latency import RankMean, RelativeLatency

STEP = 0.02
"""Share of the difference, in its logarithm, that one first token corrects: about 50 first tokens form a new value."""

WIDEST = 4.0
"""Limit of the ratio between measured and forecast time of a single first token."""

MAX_EXPECTED = 1 << 16
"""Forecasts that wait for their first token; beyond it the oldest are dropped."""


class _Expected(NamedTuple):
    forecast_ms: float
    dispatched: float
    latency: float
    """Relative latency of the rank at dispatch."""
    mean: RankMean | None
    """The rank's first tokens; of an earlier incarnation if the rank has restarted since."""


class LatencyCalibration:
    """Learns the factor. Pure: every event is passed in with its time in seconds."""

    def __init__(self) -> None:
        self.value = 1.0
        """Measured time over forecast time."""
        self.relative = RelativeLatency()
        """How slow each rank is, relative to the component."""
        self._expected: dict[Hashable, _Expected] = {}

    def expect(self, key: Hashable, rank: Rank, forecast_ms: float, now: float) -> None:
        """Notes that a request was dispatched to a rank.

        Args:
            key: Key of its booking.
            rank: The rank.
            forecast_ms: Its forecast time to first token at the component's speed, ms.
            now: Time in seconds.
        """
        if len(self._expected) >= MAX_EXPECTED:
            del self._expected[next(iter(self._expected))]
        relative = self.relative
        self._expected[key] = _Expected(forecast_ms, now, relative.of(rank, now), relative.mean_of(rank))

    def first_token(self, key: Hashable, now: float) -> None:
        """Updates the factors with the first token of a request."""
        expected = self._expected.pop(key, None)
        if expected is None or expected.forecast_ms <= 0:
            return
        ratio = (now - expected.dispatched) * 1e3 / expected.forecast_ms
        if expected.mean is not None:
            self.relative.observe(expected.mean, ratio, now)
        self.value *= min(max(ratio / expected.latency, 1 / WIDEST), WIDEST) ** STEP

    def forget(self, key: Hashable) -> None:
        """Drops the forecast of a request that ended without a first token."""
        self._expected.pop(key, None)
