"""Tries stalled workers with requests of this Frontend's own, so one without traffic recovers as well.

Only output shows that an engine generates again: a probe is answered by the worker's event loop.
"""

from __future__ import annotations

import asyncio
import os
from functools import partial

import structlog
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.workers.attempt import Outcome, WorkerAttempt
from kvrouter.frontend.workers.failures import WorkerFailure
from kvrouter.frontend.workers.health import WorkerHealth
from kvrouter.frontend.workers.observed_worker import ObservedWorker
from kvrouter.frontend.workers.pool import WorkerPool
from kvrouter.runtime.config.fields import is_url
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import Role, Stage
from kvrouter.v1.worker_pb2 import StopConditions, WorkerServiceGenerateRequest

log = structlog.get_logger(component="frontend")

_PROMPT = (0,)
"""Shorter than a block, so the engine caches nothing of it."""


class StallTrials:
    """Sends a request for one token to each stalled worker whose back-off has ended."""

    def __init__(self, pool: WorkerPool, health: WorkerHealth, metrics: FrontendMetrics) -> None:
        self._pool = pool
        self._health = health
        self._metrics = metrics
        self._running: dict[str, WorkerAttempt] = {}
        self._refused: set[str] = set()
        """Addresses of stalled workers that refuse such a request. A client's request tries them."""

    def start_due(self) -> None:
        """Starts the trials due. Each ends with its first output, or when its worker stalls again."""
        stalled = {worker.endpoint: worker for worker in self._health.stalled_workers()}
        self._refused &= stalled.keys()
        for endpoint in stalled.keys() - self._running.keys() - self._refused:
            worker = stalled[endpoint]
            if self._health.admits(worker) and not worker.leaving and _has_generate(worker):
                self._start(worker)

    def _start(self, worker: ObservedWorker) -> None:
        endpoint = worker.endpoint
        request = WorkerServiceGenerateRequest(
            request_id=f"trial-{os.urandom(8).hex()}",
            token_ids=_PROMPT,
            stop_conditions=StopConditions(max_tokens=1),
            stage=Stage.STAGE_WHOLE,
        )
        attempt = self._running[endpoint] = WorkerAttempt(
            worker.registered[0][1].worker_id,
            request.request_id,
            self._health.begin(endpoint, len(_PROMPT)),
            self._metrics,
            # A worker that stalls after every first token is not recovered: its failures stay counted.
            lambda output: attempt.cancel() if output.tokens else None,
            max_tokens=1,
            deadline=Deadline.never(),
            may_leave=lambda _: True,
            stays_a_probe=False,
        )
        attempt.ended.add_done_callback(partial(self._end, endpoint))
        encoded = request.SerializeToString()
        attempt.start(lambda receiver: self._pool.start(endpoint, encoded, receiver, deadline=Deadline.never()))

    def _end(self, endpoint: str, ended: asyncio.Future[Outcome]) -> None:
        del self._running[endpoint]
        outcome = None if ended.cancelled() else ended.result()
        if isinstance(outcome, Exception) or (isinstance(outcome, WorkerFailure) and outcome.cause == "UNIMPLEMENTED"):
            self._refused.add(endpoint)
            log.info("worker.trial_refused", endpoint=endpoint, cause=str(outcome), consequence="a request tries it")

    def close(self) -> None:
        """Cancels the running trials."""
        for attempt in self._running.values():
            attempt.cancel()


def _has_generate(worker: ObservedWorker) -> bool:
    """Returns whether a worker serves whole requests at its Generate: no prefill worker, and no listed OpenAI API."""
    return not is_url(worker.endpoint) and any(each.role != Role.ROLE_PREFILL for _, each in worker.registered)
