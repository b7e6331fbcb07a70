"""Learns how slow each rank of a component is, relative to the component, from first tokens.

Each suitable first token of a rank gives x = log(measured / forecast), the forecast without the rank's own factor.
From these:

    n         = weight of a rank's first tokens, at most WINDOW; halved by each HALF_LIFE_S
    m         = mean of x on a rank, of which a new one corrects 1 / n
    s         = standard deviation of x around m over all ranks, at least LEAST_SPREAD
    d         = m - mean of m over the ranks, by their weights
    doubt     = max(DOUBT * s / sqrt(n), TRAFFIC)           deviation explained by chance or traffic
    latency   = exp(d * max(0, 1 - (doubt / d)^2))          measured time of the rank over the component's    [1]

A deviation explained by chance or traffic is thus none: ranks of equal speed have exactly 1, and so has a rank with
few first tokens. A large one counts almost whole (the positive-part estimator of James and Stein). A rank without
requests returns to 1 by its half-life and is measured again: no rank is avoided for ever.

Beside it, the time model of mode ``forecast`` is calibrated against the engines of the whole component:

    value *= clamp(measured / (forecast * relative latency), 1/4, 4) ^ STEP         at each suitable first token

The factor serves all ranks, and forecasts are those at the component's speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np
from kvrouter.core import Rank
from numpy.typing import NDArray

WINDOW = 50
"""First tokens in a rank's mean. More would follow a change of speed more slowly, and would tell speeds
apart whose difference is too small to matter."""

DOUBT = 4.0
"""Standard errors explained by chance. At 3, equal ranks of a full fleet seemed unequal in a sixth of the time: past
the knee, deviations have long tails."""

SPREAD, LEAST_SPREAD = 0.25, 0.1
"""Standard deviation of x before the first one is known, and the lowest credible one. Measured ones are 0.06 to
0.3: the most where ranks are full, the least where prompts are long."""

SPREAD_STEP = 0.02
"""Correction of the variance by one first token, as a share of the difference: about 50 form a new value."""

TRAFFIC = 0.2
"""Deviation, in its logarithm, explained by a difference in traffic. Ranks of equal speed whose requests share a
popular prompt decode more context per block than the time model assumes: they are up to a fifth slower than others."""

HALF_LIFE_S = 300.0
"""Seconds after which a rank's first tokens count half. A worker after a slow spell is tried again within
some minutes, while ranks in use have hundreds of first tokens meanwhile."""

WIDEST = 4.0
"""Limit of a single ratio of measured to forecast time, and of a relative latency, in either direction."""

REFRESH_S = 0.1
"""Seconds for which the column is reused, because it is read in every decision."""


def limited(ratio: float, widest: float) -> float:
    """Returns a ratio of 1 / ``widest`` to ``widest``: the one given, or the nearest."""
    if ratio > widest:
        return widest
    return max(ratio, 1 / widest)


@dataclass(slots=True, eq=False)
class RankMean:
    """First tokens of one incarnation of a rank."""

    incarnation: int
    weight: float = 0.0
    mean: float = 0.0
    updated: float = 0.0

    def weight_at(self, now: float) -> float:
        """Returns the weight of the first tokens at a time in seconds."""
        return self.weight * math.pow(2.0, (self.updated - now) / HALF_LIFE_S)


class RankSpeed(msgspec.Struct, frozen=True):
    """The speed of a rank at one time."""

    latency: float
    """Its relative latency."""
    mean: RankMean | None
    """First tokens of its incarnation; None if it is not registered."""


_UNKNOWN = RankSpeed(1.0, None)


class RelativeLatency:
    """Relative latencies of the registered ranks of one component. Pure: times are passed in, in seconds."""

    def __init__(self) -> None:
        self._means: dict[Rank, RankMean] = {}
        self._places: dict[Rank, int] = {}
        self._variance = SPREAD**2
        self._column: NDArray[np.float64] = np.ones(0)
        self._refresh_at = -math.inf

    def set_ranks(self, registered: Iterable[tuple[Rank, int]]) -> None:
        """Replaces the registered ranks and their incarnations, in the order of the column.

        Unregistered ranks are forgotten, and a new incarnation starts anew.
        """
        before, self._means = self._means, {}
        for rank, incarnation in registered:
            known = before.get(rank)
            same = known is not None and known.incarnation == incarnation
            self._means[rank] = known if known is not None and same else RankMean(incarnation)
        self._places = {rank: place for place, rank in enumerate(self._means)}
        self._refresh_at = -math.inf

    def observe(self, rank_mean: RankMean, ratio: float, now: float) -> None:
        """Adds a first token: its measured time over the forecast for a rank of the component's speed."""
        weight = rank_mean.weight_at(now)
        off = math.log(limited(ratio, WIDEST)) - rank_mean.mean
        if weight >= 1.0:
            # From a mean of n, a value lies further off than from the true one: by (n + 1) / n in its square.
            self._variance += SPREAD_STEP * (off**2 * weight / (weight + 1.0) - self._variance)
        rank_mean.weight, rank_mean.updated = min(weight + 1.0, WINDOW), now
        rank_mean.mean += off / rank_mean.weight

    def of(self, rank: Rank, now: float) -> RankSpeed:
        """Returns what is known of a rank; nothing if it is not registered."""
        place = self._places.get(rank)
        return _UNKNOWN if place is None else RankSpeed(self.column(now).item(place), self._means[rank])

    def column(self, now: float) -> NDArray[np.float64]:
        """Returns the relative latencies of the registered ranks, at most REFRESH_S old."""
        if now >= self._refresh_at:
            self._column, self._refresh_at = self._estimate(now), now + REFRESH_S
        return self._column

    def _estimate(self, now: float) -> NDArray[np.float64]:
        means = self._means.values()
        weights = np.array([mean.weight_at(now) for mean in means], np.float64)
        total = weights.sum()
        if not total:
            return np.ones(len(means))
        logs = np.array([mean.mean for mean in means], np.float64)
        deviations = np.where(weights > 0, logs - (weights * logs).sum() / total, 0.0)
        spread = max(self._variance, LEAST_SPREAD**2)
        with np.errstate(divide="ignore", invalid="ignore"):
            doubt = np.maximum(DOUBT**2 * spread / weights, TRAFFIC**2)
            kept = deviations - doubt / deviations
        trusted = deviations**2 > doubt
        latencies: NDArray[np.float64] = np.clip(np.exp(np.where(trusted, kept, 0.0)), 1 / WIDEST, WIDEST)
        return latencies


STEP = 0.02
"""Correction by one first token, as a share of the difference in logarithms: about 50 form a new value."""


class LatencyCalibration:
    """Learns the factor. Pure: every event is passed in with its time in seconds."""

    def __init__(self) -> None:
        self.value = 1.0
        """Measured time over forecast time."""
        self.relative = RelativeLatency()
        """How slow each rank is, relative to the component."""

    def learn(self, measured_ms: float, forecast_ms: float, speed: RankSpeed, now: float) -> None:
        """Learns from a first token.

        Args:
            measured_ms: Its time since the dispatch, ms.
            forecast_ms: The forecast at the component's speed, ms; one of 0 or less is not compared.
            speed: The speed of the rank as it was known at the dispatch.
            now: Time in seconds.
        """
        if forecast_ms <= 0:
            return
        ratio = measured_ms / forecast_ms
        if speed.mean is not None:
            self.relative.observe(speed.mean, ratio, now)
        self.value *= limited(ratio / speed.latency, WIDEST) ** STEP
