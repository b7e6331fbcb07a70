"""Which pools restart as a whole: they had workers taking requests a moment ago, and have none now."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.v1.names import ComponentName

_SETTLING_SECONDS = 5.0
"""Time after the first worker's return in which a busy Scheduler may not have discovered it."""


class RestartingPools:
    """The pools that had workers, with the times at which they lost and regained them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Knows no pool yet. ``clock`` returns seconds."""
        self._clock = clock
        self._lost_at: dict[ComponentName, float | None] = {}
        """Time at which a pool that had workers lost its last one; None while it has some."""
        self._back_at: dict[ComponentName, float] = {}

    def update(self, components: Mapping[ComponentName, ComponentView]) -> None:
        """Applies the registrations. Workers draining take no requests."""
        now = self._clock()
        for name in self._lost_at.keys() - components.keys():
            del self._lost_at[name]
            self._back_at.pop(name, None)
        for name, view in components.items():
            if any(not worker.draining for worker in view.workers.values()):
                if self._lost_at.get(name) is not None:
                    self._back_at[name] = now
                self._lost_at[name] = None
            elif name in self._lost_at and self._lost_at[name] is None:
                self._lost_at[name] = now

    def is_restarting(self, name: ComponentName, seconds: float, *, is_empty: bool = False) -> bool:
        """Returns whether a pool lost its last worker within so many seconds, or has just got the first one back.

        Args:
            name: The pool.
            seconds: Time that a restart may take.
            is_empty: Whether a Scheduler knows no worker of the pool. It may learn of a loss first.
        """
        now = self._clock()
        lost_at = self._lost_at.get(name)
        if lost_at is not None:
            return now - lost_at < seconds
        if is_empty:
            return name in self._lost_at
        return name in self._back_at and now - self._back_at[name] < _SETTLING_SECONDS
