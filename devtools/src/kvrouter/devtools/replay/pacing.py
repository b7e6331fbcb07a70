"""When requests are due, and how late they were sent.

Two factors, kept apart: the *load factor* compresses the trace's arrivals against engine time, so it decides how hard
the engines work; the *clock factor* compresses engine time against the wall, so it decides how long a run takes.

    due (engine seconds) = arrival_ms / 1000 / load
    due (wall seconds)   = due (engine seconds) / clock
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimeScale:
    """How a trace's time maps to engine time and to the wall. Raises ValueError for factors that are not above 0."""

    load: float
    """Load factor: at 2 requests arrive twice as fast, in engine time, as in the trace. Above 0."""
    clock: float
    """Clock factor: engine seconds that pass in one wall second. Above 0."""

    def __post_init__(self) -> None:
        for name in ("load", "clock"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} factor is {getattr(self, name)}, must be above 0 and finite")

    def due_engine_seconds(self, arrival_ms: float) -> float:
        """Engine seconds from the start of the run to the arrival."""
        return arrival_ms / 1000 / self.load

    def due_wall_seconds(self, arrival_ms: float) -> float:
        """Wall seconds from the start of the run to the arrival."""
        return self.due_engine_seconds(arrival_ms) / self.clock

    def engine_seconds(self, wall_seconds: float) -> float:
        """Engine seconds that pass in a span of wall time."""
        return wall_seconds * self.clock
