"""Starts attempts of requests at workers."""

from __future__ import annotations

import asyncio
from typing import Protocol

from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.packed_prompt import encode_with_prompt
from kvrouter.frontend.workers.attempt import Dispatch, WorkerAttempt
from kvrouter.frontend.workers.connection import Probe
from kvrouter.frontend.workers.health import WorkerHealth
from kvrouter.frontend.workers.pool import WorkerPool
from kvrouter.v1.registry_pb2 import WorkerRegistration

_ANSWER_SECONDS = 0.5


class Workers(Protocol):
    """Where attempts are started: at the workers' Generate, or at another API of theirs."""

    health: WorkerHealth

    def can_prefill(self, worker: WorkerRegistration) -> bool:
        """Returns whether a prefill worker can compute the prompt of a request started here."""
        ...

    def start(self, dispatch: Dispatch) -> WorkerAttempt:
        """Starts a request at a worker. The caller waits for ``ended``, or cancels the attempt."""
        ...

    async def answers(self, endpoint: str) -> bool:
        """Returns whether a worker is registered and answers a probe soon."""
        ...

    async def is_reachable(self, endpoint: str) -> bool:
        """Returns False if a worker refuses connections now. There may be a connection already."""
        ...

    async def abort(self, endpoint: str, request_id: str) -> bool:
        """Aborts a request a worker may still run. Returns whether the worker could be reached soon."""
        ...


class WorkerClient:
    """Calls workers, limits their output, and records their health."""

    def __init__(self, pool: WorkerPool, health: WorkerHealth, metrics: FrontendMetrics) -> None:
        self._pool = pool
        self.metrics = metrics
        self.health = health

    def can_prefill(self, worker: WorkerRegistration) -> bool:  # noqa: ARG002 - any can
        """Returns True: every worker has a Generate."""
        return True

    def start(self, dispatch: Dispatch) -> WorkerAttempt:
        """Starts a request at a worker, and limits its output.

        The attempt leaves a worker that stops answering probes as soon as ``may_leave`` returns True.
        """
        endpoint, deadline = dispatch.endpoint, dispatch.deadline
        attempt = WorkerAttempt(dispatch, self.health.begin(endpoint, dispatch.prompt_tokens), self.metrics)
        encoded = encode_with_prompt(dispatch.request, dispatch.prompt)
        attempt.start(lambda receiver: self._pool.start(endpoint, encoded, receiver, deadline=deadline))
        return attempt

    async def answers(self, endpoint: str) -> bool:
        """Returns whether a worker is registered and answers a probe within half a second."""
        if endpoint not in self.health.endpoints():
            return False
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                return await self._pool.probe(endpoint) is Probe.ANSWERED
        except TimeoutError:
            return False

    async def is_reachable(self, endpoint: str) -> bool:
        """Returns False if a worker refuses connections now. Costs nothing if there is a connection already."""
        if self._pool.is_connected(endpoint):
            return True
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                return await self._pool.probe(endpoint) is not Probe.UNREACHABLE
        except TimeoutError:
            return True

    async def abort(self, endpoint: str, request_id: str) -> bool:
        """Aborts a request a worker may still run. Returns whether the worker could be reached soon."""
        return await self._pool.abort(endpoint, request_id)
