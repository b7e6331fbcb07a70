"""A Frontend's observations of one worker and of its calls, and the state following from them.

A worker of failing requests looks idle, and without a circuit breaker would attract more than its share of requests:
a growing back-off while its requests fail, then one trial request at a time. Only failures that are the worker's fault
are reported; cancelled or invalid requests change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import msgspec
import structlog
from kvrouter.frontend.workers.failures import WorkerFailure, WorkerFate
from kvrouter.frontend.workers.stall_detection import MonitoredRequest, StallDetector
from kvrouter.v1.frontend_pb2 import WorkerHealthState
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import WorkerRegistration

_MAX_DOUBLINGS = 32
_JITTER = 0.25
"""Relative variation of a back-off, so Frontends do not all try a worker again at the same moment."""


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
        self.is_closed = True
        """Whether requests are admitted without a trial."""
        self._retry_at = 0.0
        """End of the back-off, while the circuit is not closed."""
        self._trials = 0
        self.failures = 0
        """Failures since the last completed request."""

    def admits(self, now: float) -> bool:
        """Returns whether a new request may go to the worker."""
        return self.is_closed or (now >= self._retry_at and not self._trials)

    def retry_in(self, now: float) -> float:
        """Returns the seconds until the back-off ends; 0 if there is none."""
        return 0.0 if self.is_closed else max(0.0, self._retry_at - now)

    def began(self, now: float) -> bool:
        """Records that a request was sent. Returns whether it is a trial, which ``trial_ended`` must end."""
        is_trial = not self.is_closed and now >= self._retry_at
        self._trials += is_trial
        return is_trial

    def trial_ended(self) -> None:
        """Records the end of a trial, whatever its result."""
        self._trials -= 1

    def responded(self) -> None:
        """Records a request's first output."""
        self.is_closed = True

    def completed(self) -> None:
        """Records that a request completed."""
        self.is_closed = True
        self.failures = 0

    def failed(self, now: float) -> None:
        """Records a failure that is the worker's fault."""
        if not self.is_closed and now < self._retry_at:
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
            self.is_closed = False
            self._retry_at = now + seconds * self._rng.uniform(1 - _JITTER, 1 + _JITTER)


REASONS = {
    WorkerHealthState.WORKER_HEALTH_STATE_SUSPECTED: "it does not answer probes",
    WorkerHealthState.WORKER_HEALTH_STATE_STALLED: "it accepts requests and generates nothing",
    WorkerHealthState.WORKER_HEALTH_STATE_BACKED_OFF: "its requests fail",
    WorkerHealthState.WORKER_HEALTH_STATE_HALF_OPEN: "a trial request decides whether it has recovered",
}
"""Why requests avoid a worker."""

LOST_SECONDS = 60.0
"""Time for which a worker is listed as lost if it was suspected when its registration ended, seconds."""

Registered = tuple[ComponentName, WorkerRegistration]


@dataclass(slots=True)
class ObservedWorker:
    """State of the worker at one address."""

    endpoint: str
    circuit: CircuitBreaker
    detector: StallDetector | None
    """None if stalls are not detected."""
    registered: Sequence[Registered] = ()
    """Its registrations. Empty after it left; two if it came back under another id."""
    former: Sequence[Registered] = ()
    """Its registrations before it left, unless they came back elsewhere."""
    kept_until: float = 0.0
    """Time at which it is forgotten after it left, unless calls run on it; seconds."""
    calls: int = 0
    """Running Generate calls."""
    missed: int = 0
    """Consecutive unanswered probes."""
    suspected: bool = False
    stalled: bool = False
    stalls: int = 0
    """How often it was found stalled."""
    migrate_unix_ns: int = 0
    """Time from which its requests continue elsewhere, because an operator drains it; 0 for never."""
    leaving: bool = False
    """Whether that time has come."""
    leaving_intervals: int = 0
    """Number of intervals at whose end it had come."""
    pieces: int = 0
    """Pieces of output it has sent. Whoever receives one adds it."""
    pieces_at_probe: int = 0
    """Those it had sent when it was last due to be probed."""
    pieces_at_interval: int = 0
    """Those it had sent at the end of the last interval."""
    last_failure: str = ""
    is_draining: bool = False
    """Whether it is stopping, or an operator drains it, or it left while it answered: then its end is no death."""
    incarnation: int = 0
    """Incarnation of its cache, which distinguishes its process from earlier ones; 0 if unknown."""
    lives: int = 0
    """Deaths so far of processes whose incarnation is unknown."""
    died_at: float = 0.0
    """Time of the latest of these, seconds."""
    fate: WorkerFate | None = None
    """What requests that left it wait for: whether it dies or recovers. None if there are none."""
    waiting: dict[object, Callable[[], None]] = field(default_factory=dict)
    """Its calls, with the functions to call while they should leave the worker."""

    @property
    def is_lost(self) -> bool:
        """Whether its registration has ended, and it does not answer."""
        return self.suspected and not self.registered

    @property
    def is_watched(self) -> bool:
        """Whether it has running calls or left its last probe unanswered, so it is probed often."""
        return bool(self.calls or self.missed)

    @property
    def should_be_left(self) -> bool:
        """Whether its requests should leave it."""
        return self.suspected or self.stalled or self.leaving


def is_healthy(worker: ObservedWorker, now: float) -> bool:
    """Returns whether new requests may go to a worker."""
    return not worker.suspected and worker.circuit.admits(now)


def state_of(worker: ObservedWorker, now: float) -> WorkerHealthState:
    """Returns the state of a worker at a time, in seconds of the clock of its circuit."""
    if worker.is_lost:
        return WorkerHealthState.WORKER_HEALTH_STATE_LOST
    if worker.suspected:
        return WorkerHealthState.WORKER_HEALTH_STATE_SUSPECTED
    if worker.stalled:
        return WorkerHealthState.WORKER_HEALTH_STATE_STALLED
    if worker.circuit.is_closed:
        return WorkerHealthState.WORKER_HEALTH_STATE_HEALTHY
    if worker.circuit.retry_in(now):
        return WorkerHealthState.WORKER_HEALTH_STATE_BACKED_OFF
    return WorkerHealthState.WORKER_HEALTH_STATE_HALF_OPEN


def ids_of(worker: ObservedWorker) -> list[int]:
    """Returns the ids under which a worker is registered, for logs."""
    return [registration.worker_id for _, registration in worker.registered]


if TYPE_CHECKING:
    from kvrouter.frontend.workers.health import WorkerHealth

log = structlog.get_logger(component="frontend")

_MAX_FAILURE_TEXT = 256
"""Stored characters of a failure message."""


class WorkerCall(msgspec.Struct, eq=False):
    """A running Generate call, as far as its worker's health is concerned. ``WorkerHealth.begin`` returns it."""

    worker: ObservedWorker
    health: WorkerHealth
    is_trial: bool
    """Whether it decides if the worker has recovered."""
    stalls_before: int
    """How often the worker was found stalled before."""
    leaving_before: int
    """Number of intervals before the call at whose end the worker was to be left."""
    monitored: MonitoredRequest | None
    """The call as stall detection sees it; None if it shows no stall."""

    @property
    def is_stalled(self) -> bool:
        """Whether the worker has stalled since the call began, and still is."""
        return self.worker.stalled and self.worker.stalls > self.stalls_before

    @property
    def is_leaving(self) -> bool:
        """Whether the request must leave the worker, because an operator drains it.

        One coming to a drained worker stays until an interval ends: its Scheduler may have learned before this
        Frontend about the end of the drain.
        """
        return self.worker.leaving and self.worker.leaving_intervals > self.leaving_before

    @property
    def is_lost(self) -> bool:
        """Whether the worker's lease has ended while it did not answer, and it was not draining."""
        return self.worker.is_lost and not self.worker.is_draining

    def fate(self, *, connection_lost: bool = False) -> WorkerFate | None:
        """Returns the fate of the worker, which the request leaves, or which fails it; None if it is draining."""
        return self.health.death_of(self.worker) if connection_lost else self.health.fate_of(self.worker)

    def answered(self) -> None:
        """Records that the worker answers, since it sent something."""
        self.health.answered(self.worker.endpoint)

    def responded(self) -> None:
        """Records the first output."""
        worker = self.worker
        if worker.fate is not None:
            self.health.recovered(worker)
        if self.monitored is not None and worker.detector is not None:
            worker.detector.first_output(self.monitored, self.health.now())
        if not worker.circuit.is_closed:
            worker.stalled = False
            worker.circuit.responded()
            log.info("worker.back_off_ended", endpoint=worker.endpoint, workers=ids_of(worker))
            self.health.reclassify(worker)

    def completed(self) -> None:
        """Records that the response is complete."""
        worker = self.worker
        if worker.fate is not None:
            self.health.recovered(worker)
        worker.last_failure = ""
        if worker.circuit.failures:
            worker.circuit.completed()
            self.health.reclassify(worker)

    def failed(self, failure: WorkerFailure) -> None:
        """Records a failure that is the worker's fault."""
        worker, circuit, now = self.worker, self.worker.circuit, self.health.now()
        worker.last_failure = failure.message[:_MAX_FAILURE_TEXT]
        failures = circuit.failures
        circuit.failed(now)
        if circuit.failures > failures and not circuit.is_closed:
            log.warning(
                "worker.backed_off",
                endpoint=worker.endpoint,
                workers=ids_of(worker),
                failures=circuit.failures,
                seconds=round(circuit.retry_in(now), 1),
                cause=failure.cause,
                consequence="no new requests while another worker fits",
            )
        self.health.reclassify(worker)

    def watch(self, reconsider: Callable[[], None]) -> None:
        """Calls a function whenever the request may have to leave the worker, until ``end``."""
        self.worker.waiting[self] = reconsider

    def end(self) -> None:
        """Records the end of the call, however it ended."""
        worker = self.worker
        worker.waiting.pop(self, None)
        worker.calls -= 1
        if self.monitored is not None and worker.detector is not None:
            worker.detector.ended(self.monitored)
        if self.is_trial:
            worker.circuit.trial_ended()
        if not worker.registered:
            self.health.forget_if_gone(worker)
