"""Learns the speed of ranks from first tokens, and ratios of measured to modelled times.

Each suitable first token of a rank gives x = log(measured / forecast), the forecast without the rank's own factor.
From these::

    n         = weight of a rank's first tokens, at most WINDOW; halved by each HALF_LIFE_S
    m         = mean of x on a rank, of which a new one corrects 1 / n
    s         = standard deviation of x around m over all ranks, at least LEAST_SPREAD
    d         = m - mean of m over the ranks, by their weights
    doubt     = max(DOUBT * s / sqrt(n), TRAFFIC)           deviation explained by chance or traffic
    latency   = exp(d * max(0, 1 - (doubt / d)^2))          measured time of the rank over the component's    [1]

A deviation explained by chance or traffic is thus none: ranks of equal speed have exactly 1, and so has a rank with
few first tokens. A large one counts almost whole (the positive-part estimator of James and Stein). A rank without
requests returns to 1 by its half-life and is measured again: no rank is avoided for ever.

Beside it, the time model of mode ``forecast`` is calibrated against the engines of the whole component::

    value *= clamp(measured / (forecast * relative latency), 1/4, 4) ^ STEP         at each suitable first token

The factor serves all ranks, and forecasts are those at the component's speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvrouter.core.interface.cache_recency import CachedRank
from kvrouter.core.interface.names import Rank

WINDOW = 50
"""First tokens in a rank's mean, and measurements in a factor. More would follow a change of speed more slowly, and
would tell speeds apart whose difference is too small to matter."""

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
"""Seconds for which the relative latencies are reused, because they are read in every decision."""

STEP = 0.02
"""Correction of the calibration by one first token, as a share of the difference in logarithms: about 50 form a new
value."""

Speed = tuple[float, int]
"""Relative latency of a rank at one time, and the number of its mean; 0 if the rank is not registered."""


class LatencyCalibration(Protocol):
    """Learns the calibration of a component, and the relative latencies of its ranks. Times are in seconds."""

    value: float
    """Measured time over forecast time; 1 before anything is measured."""

    def set_ranks(self, ranks: Sequence[CachedRank]) -> None:
        """Replaces the registered ranks, in the order of the row. All others, and other incarnations, are forgotten."""

    def speed(self, rank: Rank, now: float) -> Speed:
        """Returns what is known of a rank; its relative latency is 1 if it is not registered."""

    def learn(self, measured_ms: float, forecast_ms: float, speed: Speed, now: float) -> None:
        """Learns from a first token.

        Args:
            measured_ms: Its time since the dispatch, ms.
            forecast_ms: The forecast at the component's speed, ms; one of 0 or less is not compared.
            speed: The speed of the rank as it was known at the dispatch.
            now: Seconds.
        """

    def relative_latency(self, now: float) -> bytes:
        """Returns a row of float64: the relative latency of each registered rank, at most REFRESH_S old.

        It is the same object as before while its numbers are the same.
        """


FACTOR_HALF_LIFE_S = 120.0
"""Seconds without measurements after which the earlier ones count for half."""

PRIOR = 3
"""Measurements for which the model counts."""

WIDEST_FACTOR = 16.0
"""Limit of a single ratio of measured to modelled time, in either direction."""


class MeasuredFactor(Protocol):
    """Measured over modelled times, of which the model counts as the first PRIOR measurements.

    The factor is ``exp(mean of log(measured / modelled))``, with the mean of about the last WINDOW measurements.
    """

    count: int
    """Number of measurements."""

    def value(self, now: float) -> float:
        """Returns the factor at a time in seconds; 1 before anything is measured."""

    def observe(self, measured_ms: float, modelled_ms: float, now: float) -> None:
        """Adds a measurement; both times in ms, ``now`` in seconds. Times of 0 or less are no measurement."""
