"""Learns how long the ranks of a component load blocks from the tiers below device memory, from first tokens.

    share(w)  = sum over tiers of tokens to load * min(time to load one, time to compute one)  part of the forecast [ms]
    loaded(w) = share(w) + measured time to first token - forecast, at least LEAST_MS          measured load        [ms]
    factor    = ``kvrouter.core.MeasuredFactor`` of loaded(w) over the load at the expected bandwidth

A first token is measured if its prompt had at least LEAST_TOKENS to load, and its rank computed no other prompt. A
request that loads from several tiers counts for each. Until there are measurements, the factor is 1: the registered
or configured bandwidth. Without new ones it returns to 1, so that a rank whose loads were slow is tried again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from kvrouter.core import MeasuredFactor, Rank
from kvrouter.scheduler.load.prefill_times import LEAST_TOKENS
from kvrouter.scheduler.workers.candidates import LOWER_TIERS
from numpy.typing import NDArray

REFRESH_SECONDS = 0.1
"""Time for which the columns are reused."""
LEAST_MS = 0.01
"""Lower limit of a measured load. A load may take place during computation and add nothing to the time."""


class ExpectedLoad(NamedTuple):
    """Blocks that a rank loads for a request."""

    rank: Rank
    tokens: tuple[int, ...]
    """Tokens by tier."""
    modelled_ms: float
    """Time at the expected bandwidth, ms."""
    share_ms: float
    """Part of the forecast, ms."""
    forecast_ms: float
    """Forecast time to first token, ms."""


class TierLoads:
    """The factors of one component. Pure: times are passed in, in seconds."""

    def __init__(self) -> None:
        self._factors: dict[tuple[Rank, int], MeasuredFactor] = {}
        self._places: dict[Rank, int] = {}
        self._columns: NDArray[np.float64] = np.ones((len(LOWER_TIERS), 0))
        self._refresh_at = -math.inf

    def set_ranks(self, registered: Iterable[Rank]) -> None:
        """Replaces the registered ranks, in the order of the columns, and forgets all others."""
        self._places = {rank: place for place, rank in enumerate(registered)}
        self._factors = {key: factor for key, factor in self._factors.items() if key[0] in self._places}
        self._refresh_at = -math.inf

    def factors(self, now: float) -> NDArray[np.float64]:
        """Returns measured over modelled load times, at most REFRESH_SECONDS old.

        There is a row for each tier, and a column for each registered rank.
        """
        if now >= self._refresh_at:
            self._columns = np.ones((len(LOWER_TIERS), len(self._places)))
            for (rank, tier), factor in self._factors.items():
                self._columns[tier, self._places[rank]] = factor.value(now)
            self._refresh_at = now + REFRESH_SECONDS
        return self._columns

    def learn(self, measured_ms: float, load: ExpectedLoad, now: float) -> None:
        """Learns from the first token of a dispatch to a rank that computes no other prompt.

        Args:
            measured_ms: Its time since the dispatch, ms.
            load: What the rank loaded.
            now: Time in seconds.
        """
        if sum(load.tokens) < LEAST_TOKENS or load.rank not in self._places:
            return
        loaded_ms = max(LEAST_MS, load.share_ms + measured_ms - load.forecast_ms)
        for tier, tokens in enumerate(load.tokens):
            if tokens:
                factor = self._factors.setdefault((load.rank, tier), MeasuredFactor())
                factor.observe(loaded_ms, load.modelled_ms, now)


def saved_shares(load_ms: NDArray[np.float64], factors: NDArray[np.float64], compute_ms: float) -> NDArray[np.float64]:
    """Returns the share of a token's computation that a rank saves by loading it, 0 to 1.

    There is a row for each tier, and a column for each rank.

    Args:
        load_ms: Time to load a token from each tier at the expected bandwidth, ms.
        factors: Measured over expected load times. Both have these rows and columns.
        compute_ms: Time to compute a token, ms.
    """
    saved: NDArray[np.float64] = np.maximum(1.0 - load_ms * factors / compute_ms, 0.0)
    return saved
