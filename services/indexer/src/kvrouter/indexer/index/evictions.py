"""Rate-limited log of ranks that were emptied because the index exceeded a bound."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvrouter.core import Rank
from structlog.typing import FilteringBoundLogger

LOG_SECONDS = 60.0
"""Minimum interval between log lines of a component. A full index evicts a rank whenever blocks are stored."""


class EvictionLog:
    """Logs the first eviction immediately; later log lines carry the number of unlogged evictions since the last."""

    def __init__(self, log: FilteringBoundLogger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._logged_at: float | None = None
        self._unlogged = 0

    def note(self, rank: Rank, dropped_blocks: int) -> None:
        """Logs or counts the eviction of a rank, which lost ``dropped_blocks`` blocks."""
        now = self._clock()
        if self._logged_at is not None and now - self._logged_at < LOG_SECONDS:
            self._unlogged += 1
            return
        self._log.warning(
            "index.rank_evicted",
            worker_id=rank[0],
            dp_rank=rank[1],
            dropped_blocks=dropped_blocks,
            evictions_since_last_log=self._unlogged,
            consequence="the rank counts as empty until its worker's cache is cleared or its state is loaded again",
            advice="raise --max-index-bytes or --max-index-blocks, or give the process more memory",
        )
        self._logged_at, self._unlogged = now, 0
