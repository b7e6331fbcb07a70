"""Computes when requests are due.

Two independent factors: the *load factor* compresses the trace's arrivals relative to engine time, which determines the
load of the engines. The *clock factor* compresses engine time relative to wall time, which determines how long a run
takes.

    due (engine seconds) = arrival_ms / 1000 / load
    due (wall seconds)   = due (engine seconds) / clock
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimeScale:
    """Maps a trace's time to engine time and to wall time. Raises ValueError for factors that are not above 0."""

    load: float
    """Load factor: at 2, requests arrive twice as fast in engine time as in the trace. Above 0."""
    clock: float
    """Clock factor: engine seconds in one wall second. Above 0."""

    def __post_init__(self) -> None:
        for name in ("load", "clock"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} factor is {getattr(self, name)}: expected a finite number above 0")

    def due_engine_seconds(self, arrival_ms: float) -> float:
        """Returns the engine seconds from the start of the run to the arrival."""
        return arrival_ms / 1000 / self.load

    def due_wall_seconds(self, arrival_ms: float) -> float:
        """Returns the wall seconds from the start of the run to the arrival."""
        return self.due_engine_seconds(arrival_ms) / self.clock

    def engine_seconds(self, wall_seconds: float) -> float:
        """Returns the engine seconds in a span of wall time."""
        return wall_seconds * self.clock
