"""Tries stalled workers with requests of this Frontend's own, so one without traffic recovers as well.

Only output shows that an engine generates again: a probe is answered by the worker's event loop.
"""

from __future__ import annotations

import asyncio
import os
from functools import partial

import structlog
from kvrouter.frontend.packed_prompt import TOKEN_BYTES
from kvrouter.frontend.workers.attempt import Dispatch, Outcome, WorkerAttempt
from kvrouter.frontend.workers.client import WorkerClient
from kvrouter.frontend.workers.failures import WorkerFailure
from kvrouter.frontend.workers.observed_worker import ObservedWorker
from kvrouter.runtime.config.fields import is_url
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import Role, Stage
from kvrouter.v1.worker_pb2 import StopConditions, WorkerServiceGenerateRequest

log = structlog.get_logger(component="frontend")

_PROMPT = bytes(TOKEN_BYTES)
"""Shorter than a block, so the engine caches nothing of it."""


class StallTrials:
    """Sends a request for one token to each stalled worker whose back-off has ended."""

    def __init__(self, workers: WorkerClient) -> None:
        self._workers = workers
        self._health = workers.health
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
        dispatch = Dispatch(
            worker.registered[0][1].worker_id,
            endpoint,
            WorkerServiceGenerateRequest(
                request_id=f"trial-{os.urandom(8).hex()}",
                stop_conditions=StopConditions(max_tokens=1),
                stage=Stage.STAGE_WHOLE,
            ),
            _PROMPT,
            # A worker that stalls after every first token is not recovered: its failures stay counted.
            lambda output: attempt.cancel() if output.tokens else None,
            Deadline.never(),
            may_leave=lambda _: True,
        )
        attempt = self._running[endpoint] = self._workers.start(dispatch)
        attempt.ended.add_done_callback(partial(self._end, endpoint))

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
