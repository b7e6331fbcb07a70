"""The prefill of one request by prefill workers, over all attempts of the request.

A failing prefill worker is replaced by another one once; then the decode worker computes the prompt itself. It does
so as well if no prefill worker is live, or if all of them are busy.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable

import structlog
from kvrouter.frontend.generate_request import StopRules
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.request.prefill_attempt import (
    AbandonedPrefills,
    PrefillAttempt,
    PrefillFailed,
    PrefillLost,
    PrefillPools,
    draw_room,
    prefill_pools,
)
from kvrouter.frontend.schedulers.booking_updates import LiveBooking
from kvrouter.frontend.schedulers.link_pool import PoolChoice, SchedulerLinks
from kvrouter.frontend.workers.attempt import Dispatch
from kvrouter.frontend.workers.client import Workers
from kvrouter.frontend.workers.poison_prompts import RequestDeaths
from kvrouter.frontend.workers.worker_request import WorkerRequest
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import ComponentView, Directory
from kvrouter.runtime.tracing import Kind, span
from kvrouter.v1.common_pb2 import BookingKey, Rank, Role, RoutingRequest, Stage
from kvrouter.v1.errors import AllBusy, KvRouterError, NotFound, NoWorkers, UnknownModel
from kvrouter.v1.scheduler_pb2 import SelectWorkerRequest
from kvrouter.v1.texts import rank_text
from kvrouter.v1.worker_pb2 import TransferParams
from msgspec.structs import replace

log = structlog.get_logger(component="frontend")

# Reading it from the enum takes over a microsecond.
_DECODE_ROLE = Role.ROLE_DECODE

MAX_FAILURES = 2
"""Prefill workers that may fail a request before its decode worker computes the prompt."""
_NEEDS_WORKER = "direct"
"""Mode taking the worker from the request, which names a decode worker."""


class Disaggregation:
    """Creates the prefill stages of requests, and has what they share."""

    def __init__(self, directory: Directory, links: SchedulerLinks, metrics: FrontendMetrics) -> None:
        self.abandoned = AbandonedPrefills(metrics)
        """Aborts prefills in the background; its ``run`` must be running."""
        self.directory = directory
        self.links = links
        self.metrics = metrics
        self.choice = PoolChoice(links)

    def stage(self, view: ComponentView, workers: Workers, deaths: RequestDeaths) -> PrefillStage | None:
        """Returns the prefill stage of a request; None if its component is not disaggregated."""
        return PrefillStage(self, view, workers, deaths) if view.role == _DECODE_ROLE else None


class PrefillStage:
    """The prefill of one request. In each attempt: ``begin``, then ``run`` or ``skip``, then ``end``."""

    def __init__(self, shared: Disaggregation, view: ComponentView, workers: Workers, deaths: RequestDeaths) -> None:
        """``view`` is the decode pool, ``deaths`` counts those of all the workers of the request."""
        self._shared = shared
        self.reason = ""
        """Why a prefill worker computes the prompt of the latest attempt or not, in English."""
        self.params: TransferParams | None = None
        """Parameters by which the decode worker receives the blocks; None if it computes the prompt itself."""
        self.spent_ns = 0
        """Time until these parameters were known, nanoseconds."""
        self.sent = False
        """Whether a prefill worker was sent the prompt."""
        self._view = view
        self._workers = workers
        self._deaths = deaths
        self._pools = PrefillPools(())
        self._numbers = itertools.count()
        self._failures = 0
        self._last_failure = ""
        self._failed_workers: set[tuple[str, int]] = set()
        """Component and id of the prefill workers that failed the request."""
        self._running: PrefillAttempt | None = None
        self._booking: LiveBooking | None = None
        """Booking of the latest prefill, running or not."""

    @property
    def rank(self) -> Rank | None:
        """The rank that computes the prompt; None if the decode worker does."""
        return None if self._running is None else self._running.booking.rank

    @property
    def is_possible(self) -> bool:
        """Whether a prefill worker can be used now."""
        return self._failures < MAX_FAILURES and bool(self._find_pools().views)

    def begin(self) -> bool:
        """Returns whether a prefill worker can be used in the next attempt."""
        self.reason, self.params, self.spent_ns = "", None, 0
        if self._failures >= MAX_FAILURES:
            return self._fall_back("failed", self._last_failure)
        self._pools = self._find_pools()
        return bool(self._pools.views) or self._fall_back("absent", self._pools.why_none)

    def _find_pools(self) -> PrefillPools:
        return prefill_pools(self._view, self._shared.directory.components.values(), self._workers.can_prefill)

    def skip(self, reason: str) -> None:
        """Notes that the Scheduler leaves the prompt to the decode worker."""
        self.reason = reason
        self._shared.metrics.prefills.labels("local").inc()

    async def run(
        self,
        request: WorkerRequest,
        prompt: bytes,
        routing: RoutingRequest,
        hashes: bytes,
        *,
        reason: str,
        deadline: Deadline,
    ) -> bool:
        """Has a prefill worker compute the prompt. Returns whether it did, or does so beside the decode worker.

        Args:
            request: The request as the decode worker would receive it.
            prompt: The prompt, a packed buffer.
            routing: The request as the decode pool's Scheduler received it.
            hashes: Local hashes of the prompt, packed.
            reason: Why a prefill worker should compute it.
            deadline: Deadline of the request.

        Raises:
            PoisonPrompt: too many workers died while they ran the request.
        """
        began = time.perf_counter_ns()
        outcome, why = "failed", ""
        views = await self._shared.choice.cheapest_first(
            self._pools.views, lambda view: self._routing(view, routing), deadline
        )
        for view in views:
            while self._failures < MAX_FAILURES:
                try:
                    self.params = await self._attempt(view, request, prompt, routing, hashes, deadline)
                except AllBusy as error:
                    outcome, why = "busy", f"the prefill workers are busy: {error.message}"
                    break
                except (NoWorkers, UnknownModel, NotFound) as error:
                    outcome, why = "failed" if self._failures else "absent", self._last_failure or error.message
                    break
                except (PrefillFailed, KvRouterError) as error:
                    outcome, why = "failed", error.message if isinstance(error, KvRouterError) else str(error)
                    self.failed(why)
                    self._deaths.check()
                    continue
                self.reason, self.spent_ns = reason, time.perf_counter_ns() - began
                self._shared.metrics.prefills.labels("remote").inc()
                self._shared.metrics.prefill_seconds.observe(self.spent_ns / 1e9)
                return True
        self.spent_ns = time.perf_counter_ns() - began
        return self._fall_back(outcome, why)

    def handover_us(self) -> int | None:
        """Returns the time since the prompt was computed, microseconds; None if no prefill worker has computed it."""
        computed_ns = 0 if self._running is None else self._running.computed_ns
        return (time.perf_counter_ns() - computed_ns) // 1000 if computed_ns else None

    def watch(self, fail: Callable[[PrefillLost], bool]) -> None:
        """Calls ``fail`` if a prefill running beside its decode worker fails, or has failed already.

        ``fail`` returns whether the decode worker needs the prefill still.
        """
        if self._running is not None:
            self._running.on_lost = lambda lost: self._lose(lost, fail)
            if self._running.lost is not None:
                self._lose(self._running.lost, fail)

    def _lose(self, lost: PrefillLost, fail: Callable[[PrefillLost], bool]) -> None:
        if fail(lost):
            self.failed(str(lost))

    def end(self, *, fetched: bool) -> None:
        """Ends the prefill of an attempt; ``fetched``: the decode worker has received the blocks."""
        running, self._running = self._running, None
        if running is None:
            return
        running.end()
        if running.may_keep_blocks and not fetched:
            self._shared.abandoned.abort(self._workers, running.endpoint, running.booking.key.request_id)

    async def is_lost(self) -> bool:
        """Returns whether the prefill worker of the attempt does not answer, so nobody gets its blocks."""
        return self._running is not None and not await self._workers.answers(self._running.endpoint)

    def failed(self, message: str) -> None:
        """Notes a failed prefill, or one whose blocks the decode worker did not get. Its worker is not used again."""
        self._failures += 1
        self._last_failure = message
        if self._booking is not None:
            booking, self._booking = self._booking, None
            self._failed_workers.add((booking.component.name, booking.rank.worker_id))
            log.warning(
                "prefill.failed",
                request_id=booking.key.request_id,
                worker=booking.rank.worker_id,
                component_name=booking.component.name,
                cause=message,
            )
        self.end(fetched=False)

    def _fall_back(self, outcome: str, why: str) -> bool:
        self.reason = why
        self._shared.metrics.prefills.labels(outcome).inc()
        return False

    async def _attempt(
        self,
        view: ComponentView,
        request: WorkerRequest,
        prompt: bytes,
        routing: RoutingRequest,
        hashes: bytes,
        deadline: Deadline,
    ) -> TransferParams:
        key = BookingKey(request_id=request.request_id, attempt=next(self._numbers), stage=Stage.STAGE_PREFILL)
        link = self._shared.links.link(view.name, hashes, routing.conversation_id)
        select = SelectWorkerRequest(request=self._routing(view, routing))
        selection, booking = await link.book(key, select, hashes, deadline=deadline)
        self._booking = booking
        worker_id = selection.rank.worker_id
        worker = view.workers.get(worker_id)
        if worker is None:
            latest = self._shared.directory.components.get(view.name)
            worker = None if latest is None else latest.workers.get(worker_id)
        # A worker with such an endpoint meets decode workers while it computes the prompt.
        params = draw_room(worker, selection.rank) if worker is not None and worker.bootstrap_endpoint else None
        self._shared.abandoned.forget(selection.endpoint, request.request_id)
        self._running = running = PrefillAttempt(booking, selection.endpoint, link, params, self._deaths)
        try:
            with span("kvrouter.v1.WorkerService/Generate", Kind.CLIENT) as prefill_span:
                if prefill_span.recording:
                    prefill_span.set(
                        {
                            "server.address": selection.endpoint,
                            "kvrouter.rank": rank_text(selection.rank),
                            "kvrouter.stage": "prefill",
                        }
                    )
                self.sent = True
                dispatch = Dispatch(
                    worker_id,
                    selection.endpoint,
                    _prefill_request(request, key, selection.rank, params),
                    prompt,
                    running.take,
                    deadline,
                    may_leave=lambda cause: self._deaths.may_leave(worker_id, cause),
                )
                running.follow(self._workers.start(dispatch))
                return await running.transfer_params()
        except PrefillFailed:
            raise
        except BaseException:
            self.end(fetched=False)
            raise

    def _routing(self, view: ComponentView, routing: RoutingRequest) -> RoutingRequest:
        """Returns the request for the Scheduler of a prefill pool. Constraints on workers name decode workers."""
        for_prefill = RoutingRequest()
        for_prefill.CopyFrom(routing)
        for_prefill.ClearField("sequences")  # It computes the prompt once.
        for_prefill.component.CopyFrom(view.descriptor.component)
        for_prefill.may_prefill_locally = False
        for_prefill.max_output_tokens = 1
        if for_prefill.overrides.mode == _NEEDS_WORKER:
            for_prefill.overrides.ClearField("mode")
        for_prefill.ClearField("constraints")
        constraints = for_prefill.constraints
        for label, value in routing.constraints.required_labels.items():
            constraints.required_labels[label] = value
        constraints.excluded_worker_ids.extend(_ids(self._failed_workers, view))
        constraints.avoided_workers.extend(self._workers.health.avoided(view.name))
        return for_prefill


def _ids(workers: Iterable[tuple[str, int]], view: ComponentView) -> list[int]:
    return [worker_id for name, worker_id in workers if name == view.name.name]


def _prefill_request(
    request: WorkerRequest, key: BookingKey, rank: Rank, params: TransferParams | None
) -> WorkerRequest:
    return replace(
        request,
        stage=Stage.STAGE_PREFILL,
        attempt=key.attempt,
        dp_rank=rank.dp_rank,
        stop=StopRules(max_tokens=1, ignore_eos=True),
        transfer_params=params,
    )
