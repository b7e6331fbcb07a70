"""A running call to a worker, which reports its fate to the worker's health."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog
from kvrouter.frontend.workers.failures import WorkerFailure, WorkerFate
from kvrouter.frontend.workers.observed_worker import ObservedWorker, ids_of
from kvrouter.frontend.workers.stall_detection import MonitoredRequest

if TYPE_CHECKING:
    from kvrouter.frontend.workers.health import WorkerHealth

log = structlog.get_logger(component="frontend")

_MAX_FAILURE_TEXT = 256
"""Stored characters of a failure message."""


class WorkerCall:
    """A running Generate call, as far as its worker's health is concerned."""

    def __init__(self, health: WorkerHealth, worker: ObservedWorker, now: float, prompt_tokens: int | None) -> None:
        self._health = health
        self._worker = worker
        self._is_trial = worker.circuit.began(now)
        worker.calls += 1
        self._stalls_before = worker.stalls
        self._leaving_before = worker.leaving_intervals
        self._monitored: MonitoredRequest | None = None
        if worker.detector is not None and prompt_tokens is not None:
            self._monitored = worker.detector.began(prompt_tokens, now)

    @property
    def is_suspected(self) -> bool:
        """Whether the worker is suspected."""
        return self._worker.suspected

    @property
    def is_stalled(self) -> bool:
        """Whether the worker has stalled since the call began, and still is."""
        return self._worker.stalled and self._worker.stalls > self._stalls_before

    @property
    def is_leaving(self) -> bool:
        """Whether the request must leave the worker, because an operator drains it.

        One coming to a drained worker stays until an interval ends: its Scheduler may have learned before this
        Frontend about the end of the drain.
        """
        return self._worker.leaving and self._worker.leaving_intervals > self._leaving_before

    @property
    def is_lost(self) -> bool:
        """Whether the worker's lease has ended while it did not answer, and it was not draining."""
        return self._worker.is_lost and not self._worker.is_draining

    def fate(self, *, connection_lost: bool = False) -> WorkerFate | None:
        """Returns the fate of the worker, which the request leaves, or which fails it; None if it is draining."""
        return self._health.death_of(self._worker) if connection_lost else self._health.fate_of(self._worker)

    @property
    def missed_probes(self) -> int:
        """Consecutive probes the worker has not answered."""
        return self._worker.missed

    def heard(self) -> None:
        """Records that the worker sent something."""
        worker = self._worker
        worker.heard = True
        if worker.detector is not None:
            worker.detector.pieces += 1
        if worker.missed:
            self._health.answered(worker.endpoint)

    def responded(self) -> None:
        """Records the first output."""
        self._health.recovered(self._worker)
        if self._monitored is not None and self._worker.detector is not None:
            self._worker.detector.first_output(self._monitored, self._health.now())
        if not self._worker.circuit.is_closed:
            self._worker.stalled = False
            self._worker.circuit.responded()
            log.info("worker.back_off_ended", endpoint=self._worker.endpoint, workers=ids_of(self._worker))
            self._health.reclassify(self._worker)

    def completed(self) -> None:
        """Records that the response is complete."""
        self._health.recovered(self._worker)
        self._worker.last_failure = ""
        if self._worker.circuit.failures:
            self._worker.circuit.completed()
            self._health.reclassify(self._worker)

    def failed(self, failure: WorkerFailure) -> None:
        """Records a failure that is the worker's fault."""
        worker, circuit, now = self._worker, self._worker.circuit, self._health.now()
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
        self._health.reclassify(worker)

    def watch(self, reconsider: Callable[[], None]) -> None:
        """Calls a function whenever the request may have to leave the worker, until ``end``."""
        self._worker.waiting[self] = reconsider

    def end(self) -> None:
        """Records the end of the call, however it ended."""
        self._worker.waiting.pop(self, None)
        self._worker.calls -= 1
        if self._monitored is not None and self._worker.detector is not None:
            self._worker.detector.ended(self._monitored)
        if self._is_trial:
            self._worker.circuit.trial_ended()
        self._health.forget_if_gone(self._worker)
