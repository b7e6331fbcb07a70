"""Probes every worker, so one whose event loop has stopped is suspected within seconds, and tries stalled ones.

A probe is a grpc.health call, which the worker's event loop answers. A deep queue or a long prefill does not delay the
answer, and a frozen process does not give it. HTTP/2 keepalive would not do: gRPC's own threads answer it.

Listed servers that have only an OpenAI API are not probed here: their discovery asks for their models.
"""

from __future__ import annotations

import asyncio
import os
from functools import partial
from random import Random

import structlog
from kvrouter.frontend.packed_prompt import TOKEN_BYTES
from kvrouter.frontend.workers.attempt import Dispatch, Outcome, WorkerAttempt
from kvrouter.frontend.workers.client import WorkerClient, WorkerPool
from kvrouter.frontend.workers.connection import Probe
from kvrouter.frontend.workers.failures import WorkerFailure
from kvrouter.frontend.workers.health import WorkerHealth
from kvrouter.frontend.workers.observed_worker import ObservedWorker
from kvrouter.runtime.config.fields import is_url
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import Directory
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


_IDLE_PROBES_PER_SECOND = 200
"""Maximum rate of probes to workers without running requests. A probe costs about 0.3 ms of processor time."""


class WorkerProbes:
    """Probes all registered workers. ``run`` must be running."""

    def __init__(
        self,
        directory: Directory,
        pool: WorkerPool,
        health: WorkerHealth,
        trials: StallTrials,
        *,
        interval_seconds: float,
    ) -> None:
        """Probes each worker every ``interval_seconds`` unless it sent something meanwhile, and starts trials.

        Workers without running requests share 200 probes per second, so many idle workers are probed less often.
        """
        self._directory = directory
        self._pool = pool
        self._health = health
        self._trials = trials
        self._interval = interval_seconds
        self._probing: dict[str, asyncio.Task[None]] = {}
        self._failing: set[str] = set()
        """Addresses whose probes hit a defect, which was logged."""
        self._rng = Random()

    async def run(self) -> None:
        """Follows the registrations and probes all workers, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_progress(), name="worker-progress")
            async for directory in self._directory.changes():
                self._health.update(directory.components)
                self._pool.update(directory.components)
                for endpoint in self._health.endpoints() - self._probing.keys():
                    if is_url(endpoint):
                        continue
                    self._probing[endpoint] = group.create_task(self._probe(endpoint), name=f"probe {endpoint}")

    async def _watch_progress(self) -> None:
        """Looks for stalled workers, and tries them. Intervals of this event loop are counted, as for probes."""
        try:
            while True:
                await asyncio.sleep(self._interval)
                self._health.interval_ended(self._interval)
                self._trials.start_due()
        finally:
            self._trials.close()

    async def _probe(self, endpoint: str) -> None:
        try:
            # Distributes over the interval the probes of workers that were discovered together.
            await asyncio.sleep(self._rng.uniform(0, self._interval))
            loop, due = asyncio.get_running_loop(), 0.0
            while endpoint in self._health.endpoints():
                heard = self._health.take_heard(endpoint)
                if not heard and (self._health.is_watched(endpoint) or loop.time() >= due):
                    await self._ask(endpoint)
                    due = loop.time() + len(self._health.endpoints()) / _IDLE_PROBES_PER_SECOND
                await asyncio.sleep(self._interval)
        finally:
            del self._probing[endpoint]
            self._failing.discard(endpoint)
        await self._pool.forget(endpoint)

    async def _ask(self, endpoint: str) -> None:
        """Waits for the answer to one probe. Each interval without it counts as missed.

        Intervals of this event loop are counted, not clock time: a gateway that was frozen itself processes the answers
        that arrived meanwhile and suspects nobody.
        """
        probe = asyncio.create_task(self._pool.probe(endpoint))
        try:
            while not (await asyncio.wait({probe}, timeout=self._interval))[0]:
                self._health.missed(endpoint)
            outcome = self._outcome_of(probe, endpoint)
            if outcome is Probe.ANSWERED:
                self._failing.discard(endpoint)
                self._health.answered(endpoint)
            else:
                self._health.missed(endpoint, is_unreachable=outcome is Probe.UNREACHABLE)
        finally:
            if not probe.done():
                probe.cancel()
                await asyncio.wait({probe})

    def _outcome_of(self, probe: asyncio.Task[Probe], endpoint: str) -> Probe:
        """Returns the outcome of a probe. A worker whose answer hits a defect is at fault alone."""
        try:
            return probe.result()
        except Exception:
            if endpoint not in self._failing:
                self._failing.add(endpoint)
                log.exception("worker.probe_failed", endpoint=endpoint)
            return Probe.UNREACHABLE
