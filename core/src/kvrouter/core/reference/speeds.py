"""Learns the speed of ranks from first tokens."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvrouter.core.interface import CachedRank, Rank
from kvrouter.core.interface.speeds import (
    DOUBT,
    FACTOR_HALF_LIFE_S,
    HALF_LIFE_S,
    LEAST_SPREAD,
    PRIOR,
    REFRESH_S,
    SPREAD,
    SPREAD_STEP,
    STEP,
    TRAFFIC,
    WIDEST,
    WIDEST_FACTOR,
    WINDOW,
    Speed,
)


def _limited(ratio: float, widest: float) -> float:
    """Returns a ratio of 1 / ``widest`` to ``widest``: the one given, or the nearest."""
    return min(max(ratio, 1 / widest), widest)


@dataclass(slots=True)
class _Mean:
    """First tokens of one incarnation of a rank."""

    incarnation: int
    number: int
    weight: float = 0.0
    mean: float = 0.0
    updated: float = 0.0

    def weight_at(self, now: float) -> float:
        return self.weight * math.pow(2.0, (self.updated - now) / HALF_LIFE_S)


class LatencyCalibration:
    """Implements ``kvrouter.core.interface.LatencyCalibration``. Not thread-safe."""

    def __init__(self) -> None:
        self.value = 1.0
        """Measured time over forecast time."""
        self._means: dict[Rank, _Mean] = {}
        self._numbered = 0
        self._variance = SPREAD**2
        self._row: list[float] = []
        self._refresh_at = -math.inf
        self._packed = b""

    def set_ranks(self, ranks: Sequence[CachedRank]) -> None:
        """Replaces the registered ranks."""
        before, self._means = self._means, {}
        for rank, incarnation, _ in ranks:
            known = before.get(rank)
            if known is None or known.incarnation != incarnation:
                self._numbered += 1
                known = _Mean(incarnation, self._numbered)
            self._means[rank] = known
        self._refresh_at = -math.inf

    def speed(self, rank: Rank, now: float) -> Speed:
        """Returns what is known of a rank."""
        known = dict(zip(self._means, self._refreshed(now), strict=True))
        return (known[rank], self._means[rank].number) if rank in known else (1.0, 0)

    def learn(self, measured_ms: float, forecast_ms: float, speed: Speed, now: float) -> None:
        """Learns from a first token."""
        if forecast_ms <= 0:
            return
        ratio, (latency, number) = measured_ms / forecast_ms, speed
        for mean in self._means.values():
            if mean.number == number:
                self._observe(mean, ratio, now)
        self.value *= _limited(ratio / latency, WIDEST) ** STEP

    def relative_latency(self, now: float) -> bytes:
        """Returns the relative latencies."""
        packed = array("d", self._refreshed(now)).tobytes()
        if packed != self._packed:
            self._packed = packed
        return self._packed

    def _observe(self, mean: _Mean, ratio: float, now: float) -> None:
        weight = mean.weight_at(now)
        off = math.log(_limited(ratio, WIDEST)) - mean.mean
        if weight >= 1.0:
            # From a mean of n, a value lies further off than from the true one: by (n + 1) / n in its square.
            self._variance += SPREAD_STEP * (off**2 * weight / (weight + 1.0) - self._variance)
        mean.weight, mean.updated = min(weight + 1.0, WINDOW), now
        mean.mean += off / mean.weight

    def _refreshed(self, now: float) -> list[float]:
        if now >= self._refresh_at:
            self._row, self._refresh_at = self._estimate(now), now + REFRESH_S
        return self._row

    def _estimate(self, now: float) -> list[float]:
        weighed = [(mean.mean, mean.weight_at(now)) for mean in self._means.values()]
        total = sum(weight for _, weight in weighed)
        common = sum(weight * mean for mean, weight in weighed) / total if total else 0.0
        return [self._latency(mean - common, weight) if weight else 1.0 for mean, weight in weighed]

    def _latency(self, deviation: float, weight: float) -> float:
        doubt = max(DOUBT**2 * max(self._variance, LEAST_SPREAD**2) / weight, TRAFFIC**2)
        return _limited(math.exp(deviation - doubt / deviation), WIDEST) if deviation**2 > doubt else 1.0


class MeasuredFactor:
    """Implements ``kvrouter.core.interface.MeasuredFactor``. Not thread-safe."""

    def __init__(self) -> None:
        self.count = 0
        """Number of measurements."""
        self._mean = 0.0
        self._weight = float(PRIOR)
        """Measurements in the mean, the model included."""
        self._last = 0.0

    def value(self, now: float) -> float:
        """Returns the factor."""
        return math.exp(self._faded(now)[0])

    def observe(self, measured_ms: float, modelled_ms: float, now: float) -> None:
        """Adds a measurement."""
        if measured_ms <= 0 or modelled_ms <= 0:
            return
        self.count += 1
        mean, weight = self._faded(now - measured_ms / 1e3)
        self._weight = min(weight + 1, WINDOW)
        self._mean = mean + (math.log(_limited(measured_ms / modelled_ms, WIDEST_FACTOR)) - mean) / self._weight
        self._last = now

    def _faded(self, now: float) -> tuple[float, float]:
        """Returns mean and weight at a time: the model replaces faded measurements."""
        left = self._weight * math.pow(0.5, max(0.0, now - self._last) / FACTOR_HALF_LIFE_S)
        weight = left + PRIOR * (1 - left / self._weight)
        return self._mean * left / weight, weight
