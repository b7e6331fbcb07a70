"""A Frontend's observations of one worker, and the state following from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrouter.frontend.workers.circuit_breaker import CircuitBreaker
from kvrouter.frontend.workers.failures import WorkerFate
from kvrouter.frontend.workers.stall_detection import StallDetector
from kvrouter.v1.frontend_pb2 import WorkerHealthState
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import WorkerRegistration

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
    heard: bool = False
    """Whether it sent anything since the last probe."""
    last_failure: str = ""
    is_draining: bool = False
    """Whether it is stopping, or an operator drains it, or did so when it left: then its end is no death."""
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
