"""Starts attempts of requests at workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.packed_prompt import TOKEN_BYTES, encode_with_prompt
from kvrouter.frontend.workers.attempt import WorkerAttempt
from kvrouter.frontend.workers.connection import Probe
from kvrouter.frontend.workers.health import WorkerHealth
from kvrouter.frontend.workers.output import Output
from kvrouter.frontend.workers.pool import WorkerPool
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import Stage
from kvrouter.v1.registry_pb2 import WorkerRegistration
from kvrouter.v1.worker_pb2 import WorkerServiceGenerateRequest

_ANSWER_SECONDS = 0.5


class Workers(Protocol):
    """Where attempts are started: at the workers' Generate, or at another API of theirs."""

    health: WorkerHealth

    def can_prefill(self, worker: WorkerRegistration) -> bool:
        """Returns whether a prefill worker can compute the prompt of a request started here."""
        ...

    def start(
        self,
        worker_id: int,
        endpoint: str,
        request: WorkerServiceGenerateRequest,
        prompt: bytes,
        on_output: Callable[[Output], None],
        *,
        deadline: Deadline,
        may_leave: Callable[[str], bool],
        stays_a_probe: bool = False,
    ) -> WorkerAttempt:
        """Starts a request at a worker; see ``WorkerClient``."""
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

    def start(
        self,
        worker_id: int,
        endpoint: str,
        request: WorkerServiceGenerateRequest,
        prompt: bytes,
        on_output: Callable[[Output], None],
        *,
        deadline: Deadline,
        may_leave: Callable[[str], bool],
        stays_a_probe: bool = False,
    ) -> WorkerAttempt:
        """Starts a request at a worker. The caller waits for ``ended``, or cancels the attempt.

        ``prompt`` is a packed buffer; the request has no token ids. ``on_output`` is called with each piece of the
        output; the last one has a finish reason. The attempt leaves a worker that stops answering probes as soon as
        ``may_leave`` returns True. With ``stays_a_probe`` it waits for one more missed probe first.
        """
        attempt = WorkerAttempt(
            worker_id,
            request.request_id,
            self.health.begin(endpoint, len(prompt) // TOKEN_BYTES),
            self.metrics,
            on_output,
            max_tokens=request.stop_conditions.max_tokens,
            deadline=deadline,
            may_leave=may_leave,
            stays_a_probe=stays_a_probe,
            shares_blame=request.HasField("transfer_params") and request.stage == Stage.STAGE_DECODE,
        )
        encoded = encode_with_prompt(request, prompt)
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
