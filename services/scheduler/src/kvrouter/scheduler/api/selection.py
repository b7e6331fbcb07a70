"""A selection: a request context goes in, a decision comes out, and is booked in the same step.

Between the snapshot of the load and the booking nothing is awaited. Requests that arrive at the same time therefore see
each other's load, one after the other, and do not all go to the rank that was idle. A request that the policy lets wait
is queued. Once a rank has room, it is decided again and booked.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from random import Random

import structlog
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import (
    AllBusy,
    BadRequest,
    DeadlineExceeded,
    KvRouterError,
    NoWorkers,
)
from kvrouter.runtime.tracing import current_span
from kvrouter.scheduler.api.repeated_selections import RepeatedSelections
from kvrouter.scheduler.api.selection_response import comparison_response, selection_response
from kvrouter.scheduler.api.span_attributes import of_decision
from kvrouter.scheduler.bookings.booking import Booking, Placement
from kvrouter.scheduler.bookings.leases import BookingLeases
from kvrouter.scheduler.bookings.table import BookingTable
from kvrouter.scheduler.bookings.updates import checked_key
from kvrouter.scheduler.identifiers import Key, stage_of
from kvrouter.scheduler.load.pools import Pool, Pools
from kvrouter.scheduler.load.thresholds import ThresholdBoard
from kvrouter.scheduler.metrics import SchedulerMetrics
from kvrouter.scheduler.overlap.indexer_query import NOT_QUERIED, IndexerSource, Overlaps, ask
from kvrouter.scheduler.overlap.predictions import Predictions
from kvrouter.scheduler.policies.interface import Choice, Explanation, Wait, rank_label
from kvrouter.scheduler.queue.queued_requests import QueuedRequests
from kvrouter.scheduler.queue.request_queue import MAX_QUEUED_REQUESTS
from kvrouter.scheduler.request.options import RoutingOptions, Tenant
from kvrouter.scheduler.request.prompt import Prompt
from kvrouter.scheduler.routing.affinity import Affinity
from kvrouter.scheduler.routing.context import BookingOptions, RequestContext, RequestReader, lease_seconds
from kvrouter.scheduler.routing.decide import Decision, decide
from kvrouter.scheduler.routing.decisions import Decisions
from kvrouter.scheduler.routing.snapshot import CandidateSnapshot, snapshot
from kvrouter.scheduler.workers.candidates import check_pinned
from kvrouter.v1.scheduler_pb2 import SelectWorkerRequest, SelectWorkerResponse

log = structlog.get_logger(component="scheduler")


class Selector:
    """Chooses a rank for a request and books the request there."""

    def __init__(
        self,
        pools: Pools,
        booking_table: BookingTable,
        booking_leases: BookingLeases,
        decisions: Decisions,
        thresholds: ThresholdBoard,
        indexers: IndexerSource,
        options: RoutingOptions,
        metrics: SchedulerMetrics,
        *,
        indexer_timeout_seconds: float,
        max_prompt_tokens: int = 1 << 32,
        rng: Random,
        clock: Callable[[], float],
        predictions: Predictions | None = None,
        affinity: Affinity | None = None,
        max_queued_requests: int = MAX_QUEUED_REQUESTS,
        is_behind: Callable[[], bool] = lambda: False,
        log_formulas: bool = False,
    ) -> None:
        """``predictions`` replace Indexers in approximate mode. ``max_queued_requests`` 0: no request is queued.

        ``is_behind`` returns whether this Scheduler is overloaded, so that callers should shard their requests.
        ``log_formulas`` logs the cost formula of every candidate of every decision.
        """
        self.reader = RequestReader(pools, thresholds, options, max_prompt_tokens=max_prompt_tokens)
        self._pools = pools
        self._booking_leases = booking_leases
        self._decisions = decisions
        self._indexers = indexers
        self._metrics = metrics
        self._indexer_timeout = indexer_timeout_seconds
        self._rng = rng
        self._clock = clock
        self._predictions = predictions
        self._affinity = Affinity(0) if affinity is None else affinity
        self._is_behind = is_behind
        self._log_formulas = log_formulas
        self._warned: set[tuple[str, str]] = set()
        self._repeated = RepeatedSelections(booking_table, booking_leases, metrics, clock)
        self.queued = (
            QueuedRequests(self, metrics, max_queued_requests=max_queued_requests, clock=clock)
            if max_queued_requests
            else None
        )
        """The request queue, whose ``run`` must be running; None if requests are not queued."""

    async def select(self, request: SelectWorkerRequest, *, deadline: Deadline) -> SelectWorkerResponse:
        """Chooses a rank, and books it if the request names a booking.

        Args:
            request: The request. If its session was opened again since, nothing is booked.
            deadline: The caller's deadline.

        Raises:
            KvRouterError: the request is refused, or no rank can take it.
        """
        if request.compares:
            return await self._compare(request, deadline)
        started = time.perf_counter()
        code, mode, queued_seconds = "OK", "", 0.0
        try:
            key = checked_key(request.booking) if request.HasField("booking") else None
            booking = BookingOptions(
                key, request.session_id, request.opening_number, lease_seconds(request.lease_ms), request.restores
            )
            context = self.reader.read(request.request, None if key is None else stage_of(request.booking), booking)
            context = context._replace(tenant=_tenant_of(request))
            mode = context.options.mode
            if context.ignored_overrides:
                self._warn_of_ignored(context)
            if key is None:
                response = await self._select(context, request, deadline)
            else:
                response = await self._repeated.once(context, key, lambda: self._select(context, request, deadline))
            queued_seconds = response.queued_us / 1e6
            if (span := current_span()).recording and (decision := self._decisions.by_id(response.decision_id)):
                span.set(of_decision(decision))
            return response
        except KvRouterError as error:
            code = error.code.name
            raise
        finally:
            self._metrics.selected(mode, code).inc()
            self._metrics.select_seconds.observe(max(0.0, time.perf_counter() - started - queued_seconds))

    async def overlaps(self, context: RequestContext, deadline: Deadline, *, needed: bool) -> Overlaps:
        """Returns the overlaps of the prompt; none if they are not ``needed``."""
        if not needed:
            return NOT_QUERIED
        elsewhere = context.prefill_pools
        if not elsewhere or context.prompt.tokens < context.options.remote_prefill.min_tokens:
            return await self._overlaps_in(context.pool, context.prompt, deadline)
        own, *others = await asyncio.gather(
            *(self._overlaps_in(pool, context.prompt, deadline) for pool in (context.pool, *elsewhere))
        )
        return own._replace(prefill={pool.name: each for pool, each in zip(elsewhere, others, strict=True)})

    async def _overlaps_in(self, pool: Pool, prompt: Prompt, deadline: Deadline) -> Overlaps:
        if self._predictions is not None:
            return self._predictions.overlaps(pool, prompt)
        return await ask(
            self._indexers,
            pool.name,
            prompt,
            block_size=pool.booked_load.block_size,
            timeout_seconds=self._indexer_timeout,
            deadline=deadline,
        )

    def snapshot(self, context: RequestContext, overlaps: Overlaps) -> CandidateSnapshot:
        """Returns a snapshot of every candidate at this moment."""
        return snapshot(context, overlaps, now=self._clock())

    def decide(self, context: RequestContext, overlaps: Overlaps, *, is_recorded: bool = True) -> Decision:
        """Decides from the current state. ``is_recorded``: whether Explain may show a refusal.

        Raises:
            KvRouterError: the request cannot be booked any more, or no rank can take it.
        """
        pool = context.pool
        if self._pools.get(pool.name) is not pool:
            raise NoWorkers(f"{pool.name} has gone, or has another block size")
        self._check(context)
        decision = decide(
            context,
            overlaps,
            rng=self._rng,
            now=self._clock(),
            decision_id=self._decisions.next_id(),
            conversation_rank=self._affinity.rank(pool.name, context.conversation),
        )
        if decision.verdict is None:
            refusal = decision.snapshot.refusal(pool.name)
            if is_recorded:
                self._record(decision._replace(explanation=Explanation(str(refusal))))
            raise refusal.untraced()
        return decision

    def settle(self, context: RequestContext, overlaps: Overlaps, decision: Decision) -> SelectWorkerResponse:
        """Books the rank of a decision made in the same step, if the request names a booking. Returns the response.

        Raises:
            KvRouterError: it cannot be booked.
        """
        pool, key = context.pool, context.booking.key
        response = selection_response(decision, overlaps)
        response.sharding_advised = self._is_behind()
        if context.ignored_overrides:
            response.ignored_overrides.extend(context.ignored_overrides)
        placement = Placement(decision.rank, decision.prefill_tokens)
        if key is not None:
            response.prefill_tokens = placement.prefill_tokens
            if not self._book(context, key, decision, placement, response):
                return self._repeated.booked_meanwhile(context, key)
        pool.previous[decision.mode] = placement.rank
        self._record(decision)
        return response

    def _book(
        self,
        context: RequestContext,
        key: Key,
        decision: Decision,
        placement: Placement,
        response: SelectWorkerResponse,
    ) -> bool:
        """Books a request on the decided rank. Returns False if its key is already booked."""
        queried_indexer = context.options.queries_indexer and not decision.load_only
        booking = Booking(
            key,
            context.pool,
            context.prompt if self._predictions is not None else context.prompt.without_local_hashes(),
            placement,
            response,
            audited=queried_indexer and not decision.is_prefilled_remotely,
            most_overlap_blocks=int(decision.snapshot.overlap_blocks.max()),
            session_id=context.booking.session_id,
            lease_seconds=context.booking.lease_seconds,
            conversation=context.conversation,
        )
        if not self._booking_leases.book(booking, self._clock(), forecast_ms=decision.forecast_ms):
            return False
        context.pool.booked_load.measure_prefill(key, placement.rank, placement.prefill_tokens)
        return True

    async def _compare(self, request: SelectWorkerRequest, deadline: Deadline) -> SelectWorkerResponse:
        """Returns the choice and its cost for a caller that compares components.

        Raises:
            KvRouterError: the request is refused, or no rank can take it.
        """
        if request.HasField("booking"):
            raise BadRequest(
                "compares: a comparison books nothing", field="booking", advice="Leave booking or compares out."
            )
        context = self.reader.read(request.request, None)
        self._check(context)
        overlaps = await self.overlaps(context, deadline, needed=context.options.queries_indexer)
        decision = self.decide(context, overlaps, is_recorded=False)
        return comparison_response(decision, overlaps, self._affinity.rank(context.pool.name, context.conversation))

    async def _select(
        self, context: RequestContext, request: SelectWorkerRequest, deadline: Deadline
    ) -> SelectWorkerResponse:
        self._check(context)
        overlaps = await self.overlaps(context, deadline, needed=context.options.queries_indexer)
        if overlaps.failure:
            self._metrics.load_only.labels(reason=overlaps.failure).inc()

        # From here to the booking nothing is awaited.
        is_behind = self.queued is not None and self.queued.catch_up(context.pool.name)
        decision = self.decide(context, overlaps)
        if is_behind and context.options.queues and isinstance(decision.verdict, Choice):
            decision = decision.behind_the_queue()
        if self.queued is None or context.booking.key is None or not isinstance(decision.verdict, Wait):
            response = self.settle(context, overlaps, decision)
            if self.queued is not None:
                self.queued.dispatched(context, decision)
            return response
        self._record(decision._replace(chosen=None, explanation=_waiting_reason(decision)))
        if request.time_left_ms:
            deadline = deadline.within(request.time_left_ms / 1e3)
        try:
            return await self.queued.enqueue(
                context,
                overlaps,
                decision,
                arrived_unix_ns=request.arrived_unix_ns,
                deadline=deadline,
            )
        except (AllBusy, DeadlineExceeded) as error:
            self._record(
                decision._replace(
                    decision_id=self._decisions.next_id(),
                    decided_unix_ns=time.time_ns(),
                    explanation=Explanation(str(error)),
                    chosen=None,
                )
            )
            raise

    def _check(self, context: RequestContext) -> None:
        booking = context.booking
        if booking.key is not None:
            self._booking_leases.check_bookable(booking.key, booking.session_id, booking.opening_number)
        if not context.pool.candidates:
            raise NoWorkers(f"{context.pool.name} has no live worker")
        check_pinned(context.pool.candidates, context.constraints, context.pool.name)

    def _warn_of_ignored(self, context: RequestContext) -> None:
        """Logs overrides without effect, once for each kind."""
        mode = context.options.mode
        news = [name for name in context.ignored_overrides if (mode, name) not in self._warned]
        if news:
            self._warned.update((mode, name) for name in news)
            log.warning("overrides.ignored", overrides=news, mode=mode)

    def _record(self, decision: Decision) -> None:
        """Keeps a decision for Explain, and logs its formulas if configured."""
        self._decisions.add(decision)
        if self._log_formulas and decision.context is not None:
            for index in range(len(decision.context.ranks)):
                formula = decision.explanation.formula(index)
                if formula:
                    log.info(
                        "decision.formula",
                        formula=formula,
                        decision=decision.decision_id,
                        request_id=decision.request_id,
                    )


def _waiting_reason(decision: Decision) -> Explanation:
    why = decision.explanation
    return why._replace(reason=f"queued for {rank_label(decision.rank)}: {why.reason}")


def _tenant_of(request: SelectWorkerRequest) -> Tenant:
    weight = request.tenant_weight
    return Tenant(request.tenant, weight if 0 < weight < math.inf else 1.0)
