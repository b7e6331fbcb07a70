"""The lifecycle of one request: book a rank, stream from its worker, report its prefill complete, free the booking.

An attempt books a rank and streams from its worker. A worker that fails or stops answering before the first token costs
an attempt, and the request is retried on another worker. A failure after the first token ends the request, since tokens
that the client has received cannot be taken back. An error that is the client's fault is passed on and never counts
against the worker. Workers that this gateway found unhealthy are avoided unless no other worker is eligible.
"""

from __future__ import annotations

import itertools
import os
import time

import structlog
from kvrouter.frontend.lifecycle.output_receiver import OutputReceiver
from kvrouter.frontend.lifecycle.progress import Progress
from kvrouter.frontend.lifecycle.prompt_hashing import hash_prompt
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.packed_prompt import TOKEN_BYTES
from kvrouter.frontend.recording.file import Outline
from kvrouter.frontend.scheduler_client.link_pool import SchedulerLinks
from kvrouter.frontend.scheduler_client.live_bookings import LiveBooking
from kvrouter.frontend.worker_client.client import Workers
from kvrouter.frontend.worker_client.eligibility import can_take
from kvrouter.frontend.worker_client.failures import WorkerFailure
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.runtime.errors import KvRouterError, NoWorkers
from kvrouter.runtime.packed_hashes import local_hashes_message
from kvrouter.v1.common_pb2 import BookingKey, Stage
from kvrouter.v1.frontend_pb2 import (
    FrontendServiceGenerateRequest,
    RoutingInfo,
)
from kvrouter.v1.scheduler_pb2 import RoutingRequest, SelectWorkerRequest, SelectWorkerResponse
from kvrouter.v1.worker_pb2 import (
    WorkerServiceGenerateRequest,
)

log = structlog.get_logger(component="frontend")

_WHOLE = Stage.STAGE_WHOLE  # Reading it from the enum takes over a microsecond.

BOOKED_ID_MARK = "~"
"""Separates a client's request id from the suffix that makes it unique to bookings and workers: clients may reuse an
id, but the key of a freed booking cannot be booked again."""


class Generation:
    """One request. Call ``run`` once."""

    def __init__(
        self,
        request: FrontendServiceGenerateRequest,
        prompt: bytes,
        view: ComponentView,
        links: SchedulerLinks,
        workers: Workers,
        metrics: FrontendMetrics,
        *,
        max_attempts: int,
    ) -> None:
        """``prompt`` is a packed buffer; the request has no token ids."""
        self._request = request
        self._prompt = prompt
        self._block_size = view.descriptor.block_size
        self._component = view.name
        self._workers = workers
        self._metrics = metrics
        self._model_metrics = metrics.models.of(view.descriptor.model)
        self._max_attempts = max_attempts
        self._arrived_ns = time.perf_counter_ns()
        self._arrived_unix_ns = time.time_ns()
        self._prompt_tokens = len(prompt) // TOKEN_BYTES
        self._output_tokens = 0
        self._failed_attempts = 0
        """Failed attempts. A repeated return to the same silent worker does not count: the Scheduler may discover
        another worker later than this gateway does."""
        self._endpoint = ""
        """Address of the worker of the latest attempt."""
        self._silent_worker_id: int | None = None
        """Worker that the previous attempt left because it stopped answering."""
        self._request_id = request.request_id or os.urandom(16).hex()
        self._booked_id = f"{self._request_id}{BOOKED_ID_MARK}{os.urandom(4).hex()}"
        self._local_hashes = hash_prompt(prompt, request, self._block_size)
        self._link = links.link(view.name, self._local_hashes, request.conversation_id)
        self._routing = RoutingRequest(
            model=request.model,
            component=view.descriptor.component,
            local_hashes=local_hashes_message(self._local_hashes),
            prompt_tokens=self._prompt_tokens,
            block_size=self._block_size,
            conversation_id=request.conversation_id,
            priority=request.priority,
            max_output_tokens=request.stop_conditions.max_tokens,
        )
        if request.HasField("scope"):
            self._routing.scope.CopyFrom(request.scope)
        if request.HasField("overrides"):
            self._routing.overrides.CopyFrom(request.overrides)
        if request.HasField("constraints"):
            self._routing.constraints.CopyFrom(request.constraints)

    def outline(self) -> Outline | None:
        """Returns what a recording stores of the request; None while it has no output."""
        if not self._output_tokens:
            return None
        return Outline(
            arrived_unix_ns=self._arrived_unix_ns,
            model=self._request.model,
            block_size=self._block_size,
            prompt_tokens=self._prompt_tokens,
            local_hashes=self._local_hashes,
            output_tokens=self._output_tokens,
        )

    def observe_success(self) -> None:
        """Counts the request as one that has ended successfully now."""
        self._model_metrics.request_seconds.observe((time.perf_counter_ns() - self._arrived_ns) / 1e9)

    async def run(self, receiver: OutputReceiver, *, deadline: Deadline) -> None:
        """Runs the request to its end. Its output goes to the receiver, in one step from the worker's connection.

        Raises:
            KvRouterError: no worker could be chosen, the worker refused the request, or the worker failed and no
                further attempt was possible.
        """
        failure: WorkerFailure | None = None
        for attempt in itertools.count():
            failure = await self._attempt(attempt, receiver, deadline, failure)
            if failure is None:
                return
            if self._output_tokens:
                raise failure.as_error(has_output=True)
            if not self._may_retry():
                raise failure.as_error(f"no attempt is left after {attempt + 1}" if attempt else "")
            self._metrics.retries.inc()
            log.warning(
                "request.retried",
                request_id=self._request_id,
                worker=failure.worker_id,
                attempt=attempt,
                cause=failure.message,
            )
            if failure.outcome_unknown:
                await self._workers.abort(self._endpoint, self._booked_id)
            if not failure.is_silent:
                self._routing.constraints.excluded_worker_ids.append(failure.worker_id)
            if failure.worker_id != self._silent_worker_id:
                self._failed_attempts += 1
            self._silent_worker_id = failure.worker_id if failure.is_silent else None

    def _may_retry(self) -> bool:
        """Returns whether a further attempt may follow. A request pinned to a worker has no alternative."""
        return self._failed_attempts + 1 < self._max_attempts and not self._request.constraints.HasField("worker_id")

    async def _attempt(
        self, attempt: int, receiver: OutputReceiver, deadline: Deadline, failure: WorkerFailure | None
    ) -> WorkerFailure | None:
        """Runs one attempt, after an earlier one that failed with ``failure``; returns how this one failed."""
        key = BookingKey(request_id=self._booked_id, attempt=attempt, stage=_WHOLE)
        avoided = [*self._request.constraints.avoided_worker_ids, *self._workers.health.avoided(self._component)]
        if avoided or failure is not None:
            self._routing.constraints.avoided_worker_ids[:] = avoided
        try:
            selection = await self._link.select(
                SelectWorkerRequest(request=self._routing, booking=key, arrived_unix_ns=self._arrived_unix_ns),
                deadline=deadline,
            )
        except NoWorkers:
            if failure is None:
                raise
            raise failure.as_error("no other worker is eligible for the request") from None
        except KvRouterError as error:
            raise error if failure is None else error.after(failure.message) from None
        booking = LiveBooking.of(key, selection, self._local_hashes, self._prompt_tokens, self._block_size)
        self._link.keep(booking)
        self._endpoint = selection.endpoint
        progress = Progress(booking, self._link, receiver, self._model_metrics, self._arrived_ns)
        try:
            receiver.routed(self._routing_info(booking, selection))
            return await self._run_on_worker(booking, progress, deadline)
        finally:
            self._output_tokens = progress.output_tokens
            progress.end()

    def _routing_info(self, booking: LiveBooking, selection: SelectWorkerResponse) -> RoutingInfo:
        added_us = (time.perf_counter_ns() - self._arrived_ns) // 1000
        self._metrics.added_seconds.observe(added_us / 1e6)
        routing = RoutingInfo(
            request_id=self._request_id,
            rank=selection.rank,
            attempt=booking.key.attempt,
            predicted_overlap_blocks=selection.overlap_blocks,
            prompt_blocks=selection.prompt_blocks,
            decision_id=selection.decision_id,
            load_only=selection.load_only,
            router_us=added_us,
            queued_us=selection.queued_us,
            mode=selection.mode,
        )
        if selection.ignored_overrides:
            routing.ignored_overrides.extend(selection.ignored_overrides)
        return routing

    async def _run_on_worker(
        self, booking: LiveBooking, progress: Progress, deadline: Deadline
    ) -> WorkerFailure | None:
        worker_id = booking.rank.worker_id
        attempt = self._workers.start(
            worker_id,
            self._endpoint,
            self._worker_request(booking),
            self._prompt,
            progress.pass_on,
            deadline=deadline,
            has_alternative=lambda: self._has_alternative(worker_id),
            stays_a_probe=worker_id == self._silent_worker_id,
        )
        try:
            outcome = await attempt.ended
        finally:
            attempt.cancel()
            del attempt  # It refers to the error below, whose traceback refers to this frame.
        if not isinstance(outcome, Exception):
            return outcome
        try:
            raise outcome
        finally:
            del outcome

    def _has_alternative(self, worker_id: int) -> bool:
        """Returns whether another healthy worker could take the request in a further attempt."""
        return self._may_retry() and any(
            worker.worker_id != worker_id and can_take(worker, self._routing.constraints, self._request.scope.lora_name)
            for worker in self._workers.health.healthy(self._component)
        )

    def _worker_request(self, booking: LiveBooking) -> WorkerServiceGenerateRequest:
        request = self._request
        for_worker = WorkerServiceGenerateRequest(
            request_id=self._booked_id,
            stop_conditions=request.stop_conditions,
            sampling_options=request.sampling_options,
            dp_rank=booking.rank.dp_rank,
            scope=request.scope,
            stage=_WHOLE,
            attempt=booking.key.attempt,
            priority=request.priority,
            conversation_id=request.conversation_id,
        )
        if request.multimodal_hashes:
            for_worker.multimodal_hashes.extend(request.multimodal_hashes)
        return for_worker
