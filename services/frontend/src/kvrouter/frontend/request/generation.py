"""The lifecycle of one request: book a rank, stream from its worker, report its prefill complete, free the booking.

An attempt books a rank and streams from its worker. A worker which fails or falls silent before the first token costs
an attempt, and the request is retried on another worker. After the first token the request migrates: it continues on
another worker, with its output so far at the end of its prompt. An error that is the client's fault is passed on and
never counts against the worker. Workers this Frontend found unhealthy are avoided unless no other is eligible.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Awaitable, Coroutine
from functools import cached_property
from random import getrandbits
from typing import Any

import structlog
from kvrouter.frontend.generate_request import GenerateRequest
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.recording.recorder import Outline
from kvrouter.frontend.request.attempt_budget import AttemptBudget, RestartWait
from kvrouter.frontend.request.attempt_input import AttemptInput
from kvrouter.frontend.request.current_choice import has_fallback
from kvrouter.frontend.request.gen_ai import TEXT_COMPLETION, span_attributes
from kvrouter.frontend.request.model_pools import can_take
from kvrouter.frontend.request.prefill_attempt import PrefillLost
from kvrouter.frontend.request.prefill_stage import PrefillStage
from kvrouter.frontend.request.progress import (
    KeptOutput,
    OutputComplete,
    OutputReceiver,
    Progress,
    traced_attempt,
)
from kvrouter.frontend.request.served_models import RequestPools
from kvrouter.frontend.schedulers.booking_updates import LiveBooking
from kvrouter.frontend.schedulers.link_pool import SchedulerLinks
from kvrouter.frontend.workers.attempt import Dispatch
from kvrouter.frontend.workers.client import Workers
from kvrouter.frontend.workers.failures import FAULTS, Fault, WorkerFailure
from kvrouter.frontend.workers.poison_prompts import RequestDeaths
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.runtime.tracing import is_recording, span
from kvrouter.v1.common_pb2 import BookingKey, KvSource, Stage
from kvrouter.v1.errors import AllBusy, KvRouterError, NoWorkers, UnknownComponent
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import SelectWorkerResponse

log = structlog.get_logger(component="frontend")

# Reading it from the enum takes over a microsecond.
_WHOLE = Stage.STAGE_WHOLE
_DECODE = Stage.STAGE_DECODE

BOOKED_ID_MARK = "~"
"""Separates a client's request id from the suffix making it unique to bookings and workers: clients may reuse an
id, but the key of a freed booking cannot be booked again."""


class _TryAgain(Exception):
    """The pool of an attempt has no worker for it. Another pool may have one, or this one has been waited for."""


class _Unreachable(Exception):
    """The worker of an attempt cannot be connected to."""

    def __init__(self, worker_id: int) -> None:
        self.failure = WorkerFailure(
            worker_id, "UNAVAILABLE", f"worker {worker_id} cannot be connected to", not_taken=True
        )
        super().__init__(self.failure.message)


class Generation:
    """One request. Call ``run`` once."""

    output_tokens = 0
    """Output tokens of all attempts that have ended."""
    first_output_ns = last_output_ns = 0
    """Times of the first and the latest output; 0 before."""
    sent = False
    """Whether a worker has got the prompt and not refused it as full."""
    _progress: Progress | None = None
    """Progress of the latest attempt."""
    _endpoint = ""
    """Address of the worker of the latest attempt."""

    def __init__(
        self,
        request: GenerateRequest,
        prompt: bytes,
        view: ComponentView,
        links: SchedulerLinks,
        workers: Workers,
        metrics: FrontendMetrics,
        budget: AttemptBudget,
        deaths: RequestDeaths,
        prefill: PrefillStage | None = None,
        pools: RequestPools | None = None,
        restart_seconds: float = 0.0,
        *,
        is_estimated: bool = False,
        operation: str = TEXT_COMPLETION,
    ) -> None:
        """Starts nothing yet.

        Args:
            request: The request, without token ids.
            prompt: The prompt, a packed buffer.
            view: The component of the first attempt.
            links: Links to the Schedulers.
            workers: Starts the attempts.
            metrics: The Frontend's metrics.
            budget: Limits the attempts.
            deaths: Counts the workers that die while they run the request, and ends it at the second one.
            prefill: Has the prompt computed by prefill workers; None if the component is not disaggregated.
            pools: Every component serving the model; None if there is only one.
            restart_seconds: Longest time to wait for a pool that restarts as a whole if no other model may serve,
                seconds.
            is_estimated: Whether the length of the prompt is an estimate.
            operation: Its operation, in the words of the GenAI conventions.
        """
        self._request = request
        self._operation = operation
        self._input = AttemptInput(request, prompt, view, is_estimated=is_estimated)
        self._workers = workers
        self._metrics = metrics
        self.model_metrics = metrics.models.of(view.model)
        """The metrics of its model."""
        self._budget = budget
        self._deaths = deaths
        self._restart_seconds = restart_seconds
        self._prefill = prefill
        self._links = links
        self._pools = pools
        self._refused: set[ComponentName] = set()
        """Components that had no worker for the next attempt."""
        self._unserved_worker_ids: list[int] = []
        """Decode workers that failed the request before output, perhaps since their prefill worker had failed."""
        self.arrived_ns = self._input.since_ns
        """Arrival of the request, by ``time.perf_counter_ns``."""
        self._input.selection.arrived_unix_ns = self._arrived_unix_ns = time.time_ns()
        self._kept = None if budget.migration_refusal() else KeptOutput()
        self._request_id = request.request_id or os.urandom(16).hex()
        self._booked_id = f"{self._request_id}{BOOKED_ID_MARK}{getrandbits(32):08x}"
        self._link = links.link(view.name, self._input.client_hashes, request.conversation_id)
        self._is_traced = is_recording()
        """Whether its spans are recorded."""

    @cached_property
    def _restart(self) -> RestartWait:
        return RestartWait(0.0 if has_fallback() else self._restart_seconds)

    def outline(self) -> Outline | None:
        """Returns the request as a recording stores it; None while it has no output."""
        if not self.output_tokens:
            return None
        return Outline(
            arrived_unix_ns=self._arrived_unix_ns,
            model=self._request.model,
            block_size=self._input.block_size,
            prompt_tokens=self._input.client_prompt_tokens,
            local_hashes=self._input.client_hashes,
            output_tokens=self.output_tokens,
        )

    def run(self, receiver: OutputReceiver, deadline: Deadline) -> Awaitable[None]:
        """Runs the request to its end. Its output goes to the receiver, in one step from the worker's connection.

        Raises:
            PoisonPrompt: two workers died while they ran it, or its tenant's requests with the same prompt.
            KvRouterError: no worker could be chosen, the worker refused the request, or the worker failed and no
                further attempt was possible.
        """
        running = self._run(receiver, deadline)
        return self._traced(running) if self._is_traced else running

    async def _traced(self, running: Awaitable[None]) -> None:
        with span("generate") as request_span:
            if request_span.recording:
                tokens, most = self._input.client_prompt_tokens, self._request.stop.max_tokens
                request_span.set(span_attributes(self._request.model, self._operation, most, tokens))
                request_span.set({"kvrouter.request_id": self._request_id})
            try:
                await running
            finally:
                if request_span.recording:
                    request_span.set({"gen_ai.usage.output_tokens": self.output_tokens})

    async def _run(self, receiver: OutputReceiver, deadline: Deadline) -> None:
        failure: WorkerFailure | None = None
        for attempt in itertools.count():
            await self._deaths.settle(self._workers.answers, deadline)
            if self._pools is not None and (failure is not None or self._refused):
                await self._choose_pool(self._pools, deadline)
            try:
                failure = await self._attempt(attempt, receiver, deadline, failure)
            except PrefillLost:
                self._deaths.check()
                continue  # The next attempt uses another prefill worker, or none.
            except _TryAgain:
                continue
            except OutputComplete:
                return
            if failure is None:
                return
            with_output = self._attempt_has_output
            self._deaths.add(failure)
            await self._deaths.shared()
            self._deaths.check()
            self._restart.failed(failure)
            if not self._budget.allows_after(failure, with_output=with_output):
                if failure.not_taken and await self._await_restart(deadline):
                    continue
                raise self._final(failure, attempt)
            if failure.outcome_unknown:
                await self._workers.abort(self._endpoint, self._booked_id)
            if with_output:
                self._continue(failure, attempt)
            else:
                self._metrics.retries.inc()
                log.warning(
                    "request.retried",
                    request_id=self._request_id,
                    worker=failure.worker_id,
                    attempt=attempt,
                    cause=failure.message,
                )
            prefill = self._prefill
            if prefill is not None and prefill.params is not None and not (with_output or failure.not_taken):
                prefill.failed(failure.message)
                self._unserved_worker_ids.append(failure.worker_id)
            elif not failure.is_silent:
                self._input.exclude(failure.worker_id)
            self._budget.failed(failure, with_output=with_output)

    async def _choose_pool(self, pools: RequestPools, deadline: Deadline) -> None:
        """Turns to the pool in which the next attempt costs least."""
        view = await pools.cheapest(self._input.prompt, deadline, refused=self._refused, current=self._input.routing)
        if view.name == self._input.component:
            return
        log.info(
            "request.changes_pool",
            request_id=self._request_id,
            left=str(self._input.component),
            component_name=str(view.name),
        )
        self._input.move_to(view)
        self._link = self._links.link(view.name, self._input.client_hashes, self._request.conversation_id)
        self._prefill = pools.prefill_stage(view)
        self._unserved_worker_ids.clear()

    @property
    def _attempt_has_output(self) -> bool:
        return self._progress is not None and self._progress.output_tokens > 0

    def _final(self, failure: WorkerFailure, attempt: int) -> KvRouterError:
        """Returns the error for the client after a failure without a further attempt."""
        if self._attempt_has_output:
            why = f"the request cannot continue on another worker: {self._budget.migration_refusal()}"
        else:
            why = f"no attempt is left after {attempt + 1}" if attempt else ""
        return failure.as_error(why, has_output=self.output_tokens > 0)

    def _continue(self, failure: WorkerFailure, attempt: int) -> None:
        """Puts the output so far at the end of the prompt of the next attempt."""
        if self._kept is None:
            raise AssertionError("a request without kept output does not migrate")
        self._input.append_output(self._kept.packed())
        self._metrics.migrations.labels(failure.cause).inc()
        log.warning(
            "request.migrated",
            request_id=self._request_id,
            worker=failure.worker_id,
            attempt=attempt,
            output_tokens=self.output_tokens,
            cause=failure.message,
        )

    async def _attempt(
        self, attempt: int, receiver: OutputReceiver, deadline: Deadline, failure: WorkerFailure | None
    ) -> WorkerFailure | None:
        """Runs one attempt, after an earlier one that failed with ``failure``; returns how this one failed."""
        unhealthy = self._workers.health.avoided(self._input.component)
        if unhealthy or attempt:
            self._input.avoid(unhealthy, self._unserved_worker_ids)
        prefill = self._prefill
        try:
            if prefill is None or not prefill.begin():
                selection, booking = await self._book(attempt, _WHOLE, deadline)
            else:
                selection, booking = await self._place(prefill, attempt, deadline)
        except (NoWorkers, AllBusy, UnknownComponent) as error:
            self._refused.add(self._input.component)
            if self._pools is not None and self._pools.others(self._refused):
                raise _TryAgain from None
            is_empty = bool(error.info.resource_name)
            if not isinstance(error, AllBusy) and await self._await_restart(deadline, is_empty=is_empty):
                raise _TryAgain from None
            if not isinstance(error, NoWorkers):
                raise error if failure is None else self._after(failure, error) from None
            if failure is None:
                raise
            why = "no other worker is eligible for the request"
            raise failure.as_error(why, has_output=self.output_tokens > 0) from None
        except _Unreachable as unreachable:
            self._progress = None
            self._metrics.worker_failures.labels(cause=unreachable.failure.cause).inc()
            return unreachable.failure
        except KvRouterError as error:
            raise error if failure is None else self._after(failure, error) from None
        self._refused.clear()
        self._endpoint = selection.endpoint
        continues = self.output_tokens > 0
        self._progress = progress = Progress(
            booking,
            self._link,
            receiver,
            self.model_metrics,
            self._input.since_ns,
            kept=self._kept,
            continues=continues,
            handover_us=None if prefill is None else prefill.handover_us,
        )
        try:
            routing = self._input.note_routing(self._request_id, booking, selection, self._budget.migrations, prefill)
            if not continues:
                self._metrics.added_seconds.observe((routing.router_us - routing.prefill_us) / 1e6)
            receiver.routed(routing)
            running = self._run_on_worker(booking, routing.kv_source, progress, deadline)
            if self._is_traced:
                return await traced_attempt(running, booking, self._endpoint, progress)
            return await running
        except KvRouterError as error:
            if failure is None or not continues or progress.output_tokens:
                raise
            raise self._after(failure, error) from None
        finally:
            self.output_tokens += progress.output_tokens
            self.first_output_ns = self.first_output_ns or progress.first_output_ns
            self.last_output_ns = progress.last_output_ns or self.last_output_ns
            progress.end()
            if prefill is not None:
                prefill.end(fetched=progress.output_tokens > 0)

    async def _place(
        self, prefill: PrefillStage, attempt: int, deadline: Deadline
    ) -> tuple[SelectWorkerResponse, LiveBooking]:
        """Books a rank, and has a prefill worker compute the prompt if it is worth it.

        Raises:
            KvRouterError: no rank could be chosen.
            _Unreachable: the decode worker cannot be connected to.
        """
        selection, booking = await self._book(attempt, _DECODE, deadline)
        decision = selection.prefill
        if "prefill" in selection and not decision.remote:
            prefill.skip(decision.reason)
            return selection, booking
        served = False
        try:
            if not await self._workers.is_reachable(selection.endpoint):
                raise _Unreachable(selection.rank.worker_id)  # Before a prefill worker computes the prompt for it.
            served = await prefill.run(
                self._input.for_worker(booking, prefill.params),
                self._input.prompt,
                self._input.routing,
                self._input.hashes,
                reason=decision.reason,
                deadline=deadline,
            )
        finally:
            self.sent = self.sent or prefill.sent
            if not served:
                self._link.free(booking, None)
        return (selection, booking) if served else await self._book(attempt, _WHOLE, deadline)

    async def _await_restart(self, deadline: Deadline, *, is_empty: bool = False) -> bool:
        """Waits a moment if the pool restarts as a whole, and lets all of its workers be tried again.

        ``is_empty``: whether the Scheduler knows no worker of the pool.

        Returns whether it did. It does not if the pool has other reasons to refuse the request.
        """
        restart = self._restart
        is_restarting = restart.has_lost_workers or self._workers.health.restarting_pools.is_restarting(
            self._input.component, restart.limit_seconds, is_empty=is_empty
        )
        if not is_restarting or not await restart.pause(deadline):
            return False
        self._refused.clear()
        self._input.readmit()
        self._budget.waited()
        return True

    def _book(
        self, attempt: int, stage: Stage, deadline: Deadline
    ) -> Coroutine[Any, Any, tuple[SelectWorkerResponse, LiveBooking]]:
        key = BookingKey(request_id=self._booked_id, attempt=attempt, stage=stage)
        if self._prefill is not None:
            self._input.routing.may_prefill_locally = stage == _DECODE
        return self._link.book(key, self._input.selection, self._input.hashes, deadline=deadline)

    def _after(self, failure: WorkerFailure, error: KvRouterError) -> KvRouterError:
        """Returns the error for the client if an attempt after a failure cannot be made.

        A refused continuation, such as one too long, is no fault of the client's.
        """
        if self.output_tokens and FAULTS.get(error.code) is Fault.REQUEST:
            why = f"the request cannot continue on another worker: {error.message}"
            return failure.as_error(why, has_output=True)
        return error.after(failure.message)

    async def _run_on_worker(
        self, booking: LiveBooking, kv_source: KvSource | None, progress: Progress, deadline: Deadline
    ) -> WorkerFailure | None:
        worker_id = booking.rank.worker_id
        prefill = self._prefill
        params = None if prefill is None else prefill.params
        was_sent, self.sent = self.sent, True
        dispatch = Dispatch(
            worker_id,
            self._endpoint,
            self._input.for_worker(booking, params, kv_source),
            self._input.prompt,
            progress.pass_on,
            deadline,
            may_leave=lambda cause: self._may_leave(worker_id, cause),
            stays_a_probe=worker_id == self._budget.silent_worker_id,
            on_written=progress.written,
        )
        attempt = self._workers.start(dispatch)
        if prefill is not None:
            prefill.watch(attempt.fail)
        try:
            outcome = await attempt.ended
            if attempt.unattributed is not None and (prefill is None or not await prefill.is_lost()):
                attempt.blame()
        finally:
            if (fate := attempt.abandon()) is not None:
                self._deaths.abandon(fate)
            del attempt  # It refers to the error below, whose traceback refers to this frame.
        if not isinstance(outcome, Exception):
            if outcome is not None and outcome.never_began:
                self.sent = was_sent
            return outcome
        try:
            raise outcome
        finally:
            del outcome

    def _may_leave(self, worker_id: int, cause: str) -> bool:
        """Returns whether the request may leave its worker: another healthy one could take it in a further attempt.

        It ends at once where it learns of its last death.
        """
        if not self._deaths.may_leave(worker_id, cause):
            return False
        if cause == "lost" and self._deaths.next_is_last:
            return True
        if not self._budget.allows(with_output=self._attempt_has_output, is_drained=cause == "drained"):
            return False
        return any(
            worker.worker_id != worker_id and can_take(worker, self._input.routing.constraints, self._request.lora_name)
            for worker in self._workers.health.healthy(self._input.component)
        ) or (self._pools is not None and self._pools.has_healthy_worker(besides=self._input.component))
