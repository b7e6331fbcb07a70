"""The health of every worker as this Frontend observes it: whether it answers probes, and whether its requests fail.

An unhealthy worker gets a request only if no healthy one is eligible: a request is attempted rather than refused.
Workers are identified by address, so a worker that restarts elsewhere has a clean record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence, Set
from random import Random

import structlog
from kvrouter.frontend.workers.failures import WorkerFate
from kvrouter.frontend.workers.observed_worker import (
    LOST_SECONDS,
    REASONS,
    BackOff,
    CircuitBreaker,
    ObservedWorker,
    Registered,
    WorkerCall,
    ids_of,
    is_healthy,
    state_of,
)
from kvrouter.frontend.workers.restarting_pools import RestartingPools
from kvrouter.frontend.workers.stall_detection import StallDetector
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.v1.common_pb2 import AvoidedWorker
from kvrouter.v1.frontend_pb2 import WorkerHealth as WorkerHealthMessage
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import WorkerRegistration

log = structlog.get_logger(component="frontend")

_ONE_DEATH_SECONDS = 5.0
"""Time within which lost connections to one address are one death, if the process there is not known."""


class WorkerHealth:
    """Workers by address. Nothing here waits; probes and calls report their results."""

    def __init__(
        self,
        back_off: BackOff,
        *,
        max_missed: int,
        stall_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        rng: Random | None = None,
    ) -> None:
        """Knows no worker yet.

        Args:
            back_off: Parameters of the circuit breakers.
            max_missed: Consecutive unanswered probes making a worker suspected.
            stall_seconds: Least time without progress making a worker stalled; 0 detects no stalls.
            clock: Returns seconds.
            rng: Varies the back-off.
        """
        self._stall_seconds = stall_seconds
        self._back_off = back_off
        self._max_missed = max_missed
        self.now = clock
        """Returns the time in seconds."""
        self._rng = rng or Random()
        self._workers: dict[str, ObservedWorker] = {}
        self.restarting_pools = RestartingPools(clock)
        self._unhealthy: dict[str, ObservedWorker] = {}
        """Suspected workers, and those whose circuit is not closed."""

    @property
    def suspected(self) -> int:
        """Number of workers that do not answer probes."""
        return sum(worker.suspected for worker in self._unhealthy.values())

    @property
    def stalled(self) -> int:
        """Number of workers which answer probes but generate nothing."""
        return len(self.stalled_workers())

    @property
    def backed_off(self) -> int:
        """Number of workers that get no requests, or single trial requests, because their requests failed."""
        return sum(not worker.circuit.is_closed for worker in self._unhealthy.values())

    def update(self, components: Mapping[ComponentName, ComponentView]) -> None:
        """Applies the registrations. A worker that left is removed when its last call has ended."""
        self.restarting_pools.update(components)
        registered: dict[str, list[Registered]] = {}
        migrating: dict[str, int] = {}
        for name, view in components.items():
            for registration in view.workers.values():
                registered.setdefault(registration.endpoint, []).append((name, registration))
                if (drain := view.drains.get(registration.worker_id)) is not None:
                    migrating[registration.endpoint] = drain.migrate_unix_ns
        for endpoint, registrations in registered.items():
            worker = self._workers.get(endpoint) or self._add(endpoint)
            if registrations != worker.registered:
                self._identify(worker, registrations)
                worker.registered = registrations
            worker.migrate_unix_ns = migrating.get(endpoint, 0)
            worker.leaving = worker.leaving and worker.migrate_unix_ns > 0
        live = {(name, each.worker_id) for found in registered.values() for name, each in found}
        for endpoint in self._workers.keys() - registered.keys():
            self._leave(self._workers[endpoint], live)
        self._wake(self._unhealthy.values())  # A new worker may take the requests of suspected ones.

    def _leave(self, worker: ObservedWorker, live: Set[tuple[ComponentName, int]]) -> None:
        if worker.registered:
            worker.former = worker.registered
            worker.kept_until = self.now() + LOST_SECONDS if worker.suspected else 0.0
            self._resolve(worker, died=not worker.is_draining)
            # The registration of a dead process ends with its lease, after it missed probes. So a worker that still
            # answers has stopped in order, even if its announcement and its end were seen together.
            worker.is_draining = worker.is_draining or not worker.suspected
        worker.registered = ()
        worker.former = [(name, each) for name, each in worker.former if (name, each.worker_id) not in live]
        self.forget_if_gone(worker)

    def _identify(self, worker: ObservedWorker, registrations: Sequence[Registered]) -> None:
        """Notes which process a worker is, and whether it is stopping."""
        ranks = registrations[0][1].ranks
        incarnation = ranks[0].incarnation if ranks else 0
        if worker.incarnation not in (0, incarnation):
            self._resolve(worker, died=not worker.is_draining)  # Another process has taken its address.
        worker.incarnation = incarnation
        worker.is_draining = any(each.draining for _, each in registrations)

    def _resolve(self, worker: ObservedWorker, *, died: bool) -> None:
        fate, worker.fate = worker.fate, None
        if fate is not None:
            fate.resolve(died=died)

    @property
    def most_watchers(self) -> int:
        """Largest number of requests waiting for the fate of a worker which they left."""
        return max((each.fate.watchers for each in self._workers.values() if each.fate is not None), default=0)

    def fate_of(self, worker: ObservedWorker) -> WorkerFate | None:
        """Returns the fate of a worker a request leaves or that fails it; None if it is draining."""
        if worker.is_draining:
            return None
        if not worker.registered:
            return WorkerFate(_identity(worker), self.now(), died=True)
        if worker.fate is None:
            worker.fate = WorkerFate(_identity(worker), self.now())
        return worker.fate

    def death_of(self, worker: ObservedWorker) -> WorkerFate | None:
        """Returns the death of a worker whose connection was lost; None if it was draining or had signed off."""
        has_signed_off = worker.former and not (worker.registered or worker.suspected)
        # One that never was registered here was chosen by a Scheduler which learned of it earlier.
        if worker.is_draining or has_signed_off:
            return None
        now = self.now()
        if not worker.incarnation and (not worker.died_at or now - worker.died_at > _ONE_DEATH_SECONDS):
            worker.lives += 1
            worker.died_at = now
        self._resolve(worker, died=True)
        return WorkerFate(_identity(worker), now, died=True)

    def recovered(self, worker: ObservedWorker) -> None:
        """Records that a worker serves requests, so those that left it know that it lives."""
        self._resolve(worker, died=False)

    def endpoints(self) -> KeysView[str]:
        """Returns the addresses of all workers, including those that left with calls still running."""
        return self._workers.keys()

    def avoided(self, component: ComponentName) -> Sequence[AvoidedWorker]:
        """Returns a component's unhealthy workers, each with the reason."""
        if not self._unhealthy:
            return ()
        now = self.now()
        return [
            AvoidedWorker(worker_id=registration.worker_id, reason=REASONS.get(state_of(worker, now), ""))
            for worker in self._unhealthy.values()
            if not is_healthy(worker, now)
            for name, registration in worker.registered
            if name == component
        ]

    def healthy(self, component: ComponentName) -> Iterator[WorkerRegistration]:
        """Yields the registrations of a component's healthy workers."""
        now = self.now()
        for worker in self._workers.values():
            if is_healthy(worker, now):
                yield from (registration for name, registration in worker.registered if name == component)

    def stalled_workers(self) -> list[ObservedWorker]:
        """Returns the stalled workers."""
        return [worker for worker in self._unhealthy.values() if worker.stalled]

    def admits(self, worker: ObservedWorker) -> bool:
        """Returns whether new requests may go to a worker, if only one at a time."""
        return is_healthy(worker, self.now())

    def begin(self, endpoint: str, prompt_tokens: int | None = None) -> WorkerCall:
        """Records the start of a call to a worker; ``WorkerCall.end`` must follow.

        ``prompt_tokens`` is None for a call whose output does not come piece by piece, which shows no stall.
        """
        worker = self._workers.get(endpoint) or self._add(endpoint)
        worker.calls += 1
        now, circuit, detector = self.now(), worker.circuit, worker.detector
        is_trial = not circuit.is_closed and circuit.began(now)
        monitored = None if detector is None or prompt_tokens is None else detector.began(prompt_tokens, now)
        return WorkerCall(worker, self, is_trial, worker.stalls, worker.leaving_intervals, monitored)

    def interval_ended(self, seconds: float) -> None:
        """Looks for workers that are stalled, generate again, or must be left. To be called at the end of intervals."""
        now_ns = time.time_ns()
        for worker in list(self._workers.values()):
            if not worker.registered:
                self.forget_if_gone(worker)
            if worker.fate is not None and self.now() - worker.fate.since > LOST_SECONDS:
                self._resolve(worker, died=False)
            worker.leaving = 0 < worker.migrate_unix_ns <= now_ns
            if worker.leaving:
                worker.leaving_intervals += 1
                self._wake([worker])
            detector = worker.detector
            if detector is None:
                continue
            detector.pieces = worker.pieces - worker.pieces_at_interval
            worker.pieces_at_interval = worker.pieces
            if detector.is_idle:
                continue
            verdict = detector.interval_ended(seconds)
            if verdict:
                self._stall(worker)
            elif verdict is False and worker.stalled:
                self._resume(worker)

    def _stall(self, worker: ObservedWorker) -> None:
        worker.stalled = True
        worker.stalls += 1
        worker.last_failure = "it accepts requests but generates nothing, or far less than before"
        now = self.now()
        worker.circuit.trip(now)
        log.warning(
            "worker.stalled",
            endpoint=worker.endpoint,
            workers=ids_of(worker),
            calls=worker.calls,
            seconds=round(worker.circuit.retry_in(now), 1),
            consequence="no new requests while another worker fits; its requests continue elsewhere",
        )
        self.reclassify(worker)

    def _resume(self, worker: ObservedWorker) -> None:
        worker.stalled = False
        worker.circuit.responded()
        self.recovered(worker)
        log.info("worker.resumed", endpoint=worker.endpoint, workers=ids_of(worker))
        self.reclassify(worker)

    def is_watched(self, endpoint: str) -> bool:
        """Returns whether a worker is known and watched; see ``ObservedWorker.is_watched``."""
        worker = self._workers.get(endpoint)
        return worker is not None and worker.is_watched

    def take_unheard(self, endpoints: Iterable[str]) -> list[str]:
        """Returns those of known workers that are watched and sent nothing since the last call."""
        unheard: list[str] = []
        for endpoint in endpoints:
            worker = self._workers[endpoint]
            if worker.is_watched and worker.pieces == worker.pieces_at_probe:
                unheard.append(endpoint)
            worker.pieces_at_probe = worker.pieces
        return unheard

    def answered(self, endpoint: str) -> None:
        """Records that a worker answered a probe or sent something."""
        worker = self._workers.get(endpoint)
        if worker is None or not (worker.missed or endpoint in self._unhealthy):
            return
        if worker.suspected:
            log.info("worker.recovered", endpoint=endpoint, workers=ids_of(worker), missed_probes=worker.missed)
            self.recovered(worker)
        worker.missed, worker.suspected = 0, False
        self.reclassify(worker)

    def missed(self, endpoint: str, *, is_unreachable: bool = False) -> None:
        """Records that another interval passed without an answer to a probe.

        A worker that cannot be connected to is suspected at once: a busy machine delays answers, but refuses nothing.
        A worker that shuts down refuses connections too, while its engine goes on with the requests forwarded to it.
        """
        worker = self._workers.get(endpoint)
        if worker is None or (is_unreachable and worker.is_draining and not worker.suspected):
            return
        worker.missed += 1
        if worker.suspected:
            self._wake([worker])  # The back-off of another worker may have ended.
        if worker.suspected or (worker.missed < self._max_missed and not is_unreachable):
            return
        worker.suspected = True
        log.warning(
            "worker.suspected",
            endpoint=endpoint,
            workers=ids_of(worker),
            missed_probes=worker.missed,
            unreachable=is_unreachable,
            calls=worker.calls,
            consequence="no new requests while another worker fits; requests without output are retried elsewhere",
        )
        self.reclassify(worker)

    def status(
        self,
        component: ComponentName | None = None,
        prompt_difference: Callable[[WorkerRegistration], str] = lambda _: "",
    ) -> list[WorkerHealthMessage]:
        """Returns the health of every worker registered or lost, or of those of one component.

        ``prompt_difference`` returns how the tokens of a worker's engine differ from those of this Frontend.
        """
        now = self.now()
        entries = [
            (name, registration, worker)
            for worker in self._workers.values()
            for name, registration in (worker.former if worker.is_lost else worker.registered)
            if component in (None, name)
        ]
        entries.sort(key=lambda entry: (str(entry[0]), entry[1].worker_id))
        return [
            WorkerHealthMessage(
                component=registration.component,
                worker_id=registration.worker_id,
                endpoint=worker.endpoint,
                state=state_of(worker, now),
                missed_probes=worker.missed,
                consecutive_failures=worker.circuit.failures,
                retry_in_ms=round(worker.circuit.retry_in(now) * 1000),
                last_failure=worker.last_failure,
                calls=worker.calls,
                prompt_difference=prompt_difference(registration),
            )
            for _, registration, worker in entries
        ]

    def _add(self, endpoint: str) -> ObservedWorker:
        detector = StallDetector(self._stall_seconds) if self._stall_seconds else None
        circuit = CircuitBreaker(self._back_off, self._rng)
        worker = self._workers[endpoint] = ObservedWorker(endpoint, circuit, detector)
        return worker

    def reclassify(self, worker: ObservedWorker) -> None:
        """Updates the set of unhealthy workers after a change, and wakes the requests that may move because of it."""
        if not worker.suspected and worker.circuit.is_closed:
            if self._unhealthy.pop(worker.endpoint, None):
                self._wake(self._unhealthy.values())
        else:
            self._unhealthy[worker.endpoint] = worker
            self._wake([worker])

    def _wake(self, workers: Iterable[ObservedWorker]) -> None:
        # Copies, because a request that leaves its worker ends its call at once.
        for worker in list(workers):
            if worker.should_be_left:
                for reconsider in list(worker.waiting.values()):
                    reconsider()

    def forget_if_gone(self, worker: ObservedWorker) -> None:
        """Forgets a worker that has left and has no more calls; a lost one nobody replaces, after a minute."""
        if worker.registered or worker.calls:
            return
        if not worker.is_lost or not worker.former or self.now() >= worker.kept_until:
            self._workers.pop(worker.endpoint, None)
            self._unhealthy.pop(worker.endpoint, None)


def _identity(worker: ObservedWorker) -> str:
    """Returns the identity of a worker's process, the same in every Frontend if its incarnation is known."""
    return f"{worker.endpoint} {worker.incarnation or worker.lives}"
