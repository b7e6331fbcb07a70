"""Backs off from a worker whose requests fail, for longer each time, and lets one request at a time try it again.

A worker that fails at once looks idle, so without this it would draw more than its share of the requests. Only failures
that are the worker's fault are reported here; requests that clients cancel, or that are wrong, change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

_MAX_DOUBLINGS = 32
_JITTER = 0.25
"""Share by which a back-off varies, so that gateways do not all try a worker again at one moment."""


@dataclass(frozen=True, slots=True)
class BackOff:
    """When to back off, and for how long."""

    failures: int = 3
    """Consecutive failures that open the circuit."""
    first_seconds: float = 1.0
    """First back-off. Each further one is twice as long."""
    max_seconds: float = 60.0
    """Longest back-off."""


class CircuitBreaker:
    """The circuit of one worker. Times are seconds of the caller's clock.

    Closed: requests are admitted. Open: none is, until the back-off ends. Half-open: one request at a time is. Its
    first output closes the circuit. Only a completed request forgets the failures: a worker that fails later in each
    answer is backed off again after a single failure.
    """

    def __init__(self, back_off: BackOff, rng: Random) -> None:
        self._back_off = back_off
        self._rng = rng
        self._retry_at: float | None = None
        self._trials = 0
        self.failures = 0
        """Failures since the last completed request."""

    @property
    def is_closed(self) -> bool:
        """Whether requests are admitted without a trial."""
        return self._retry_at is None

    def admits(self, now: float) -> bool:
        """Returns whether a new request should go to the worker."""
        return self._retry_at is None or (now >= self._retry_at and not self._trials)

    def retry_in(self, now: float) -> float:
        """Returns the seconds until the back-off ends; 0 if it has, or there is none."""
        return 0.0 if self._retry_at is None else max(0.0, self._retry_at - now)

    def began(self, now: float) -> bool:
        """Notes that a request was sent. Returns whether it is a trial, which ``trial_ended`` must close."""
        is_trial = self._retry_at is not None and now >= self._retry_at
        self._trials += is_trial
        return is_trial

    def trial_ended(self) -> None:
        """Notes that a trial is over, whatever came of it."""
        self._trials -= 1

    def responded(self) -> None:
        """Notes a request's first output."""
        self._retry_at = None

    def completed(self) -> None:
        """Notes that a request ran to its end."""
        self._retry_at = None
        self.failures = 0

    def failed(self, now: float) -> None:
        """Notes that a request failed through the worker."""
        if self._retry_at is not None and now < self._retry_at:
            return  # It was sent before the circuit opened, or for lack of any other worker.
        self.failures += 1
        excess = self.failures - self._back_off.failures
        if excess >= 0:
            seconds = min(self._back_off.max_seconds, self._back_off.first_seconds * 2.0 ** min(excess, _MAX_DOUBLINGS))
            self._retry_at = now + seconds * self._rng.uniform(1 - _JITTER, 1 + _JITTER)
