"""A circuit breaker for one worker: growing back-off while its requests fail, then one trial request at a time.

A worker of failing requests looks idle, and without a breaker would attract more than its share of requests. Only
failures that are the worker's fault are reported here; cancelled or invalid requests change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

_MAX_DOUBLINGS = 32
_JITTER = 0.25
"""Relative variation of a back-off, so gateways do not all try a worker again at the same moment."""


@dataclass(frozen=True, slots=True)
class BackOff:
    """Parameters of the back-off."""

    failures: int = 3
    """Consecutive failures that open the circuit."""
    first_seconds: float = 1.0
    """First back-off, seconds. Each further one is twice as long."""
    max_seconds: float = 60.0
    """Maximum back-off, seconds."""


class CircuitBreaker:
    """The circuit of one worker. Times are seconds of the caller's clock.

    Closed: all requests are admitted. Open: none until the back-off ends. Half-open: one request at a time. The first
    output of a trial closes the circuit, but only a completed request resets the failure count: a worker failing
    in the middle of each response is backed off again after a single failure.
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
        """Returns whether a new request may go to the worker."""
        return self._retry_at is None or (now >= self._retry_at and not self._trials)

    def retry_in(self, now: float) -> float:
        """Returns the seconds until the back-off ends; 0 if there is none."""
        return 0.0 if self._retry_at is None else max(0.0, self._retry_at - now)

    def began(self, now: float) -> bool:
        """Records that a request was sent. Returns whether it is a trial, which ``trial_ended`` must end."""
        is_trial = self._retry_at is not None and now >= self._retry_at
        self._trials += is_trial
        return is_trial

    def trial_ended(self) -> None:
        """Records the end of a trial, whatever its result."""
        self._trials -= 1

    def responded(self) -> None:
        """Records a request's first output."""
        self._retry_at = None

    def completed(self) -> None:
        """Records that a request completed."""
        self._retry_at = None
        self.failures = 0

    def failed(self, now: float) -> None:
        """Records a failure that is the worker's fault."""
        if self._retry_at is not None and now < self._retry_at:
            return  # The request was sent before the circuit opened, or because no other worker was eligible.
        self.failures += 1
        self._back_off_from(now)

    def trip(self, now: float) -> None:
        """Opens the circuit, as if the worker had failed once more than it may."""
        self.failures = max(self.failures + 1, self._back_off.failures)
        self._back_off_from(now)

    def _back_off_from(self, now: float) -> None:
        excess = self.failures - self._back_off.failures
        if excess >= 0:
            seconds = min(self._back_off.max_seconds, self._back_off.first_seconds * 2.0 ** min(excess, _MAX_DOUBLINGS))
            self._retry_at = now + seconds * self._rng.uniform(1 - _JITTER, 1 + _JITTER)
