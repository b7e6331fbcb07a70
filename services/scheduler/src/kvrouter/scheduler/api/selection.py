"""A selection: the component, the prompt, the overlaps, then choice and booking in one step.

Nothing is awaited between reading the loads and booking. Requests that come in one moment therefore see each other's
load, one after another, instead of all going to the rank that was idle. A request that the policy holds is chosen for
again, and booked, when it can go.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random

import structlog
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import (
    AllBusy,
    BadRequest,
    DeadlineExceeded,
    KvRouterError,
    NoWorkers,
    RequestIdReused,
)
from kvrouter.scheduler.api.selection_response import answer
from kvrouter.scheduler.bookings.booking import Booking, Placement
from kvrouter.scheduler.bookings.leases import BookingFreed, BookingLeases
from kvrouter.scheduler.bookings.table import BookingTable
from kvrouter.scheduler.bookings.updates import checked_key
from kvrouter.scheduler.identifiers import Key, stage_of
from kvrouter.scheduler.load.pools import Pools
from kvrouter.scheduler.load.thresholds import ThresholdBoard
from kvrouter.scheduler.metrics import SchedulerMetrics
from kvrouter.scheduler.overlap.indexer_query import NOT_QUERIED, IndexerSource, Overlaps, ask
from kvrouter.scheduler.overlap.predictions import Predictions
from kvrouter.scheduler.policies.catalogue import POLICIES
from kvrouter.scheduler.policies.interface import Explanation, Wait, rank_label
from kvrouter.scheduler.queue.queued_requests import QueuedRequests
from kvrouter.scheduler.queue.request_queue import MAX_QUEUED_REQUESTS
from kvrouter.scheduler.request.options import RoutingOptions, overridden
from kvrouter.scheduler.request.prompt import read_prompt
from kvrouter.scheduler.routing.affinity import Affinity, conversation_of
from kvrouter.scheduler.routing.candidate_snapshot import CandidateRow, CandidateSnapshot, snapshot
from kvrouter.scheduler.routing.choice import Chosen, choose
from kvrouter.scheduler.routing.decisions import Decided, Decisions
from kvrouter.scheduler.routing.request_context import BookingContext, RequestContext, lease_seconds
from kvrouter.scheduler.workers.candidates import WorkerConstraints, check_pinned
from kvrouter.v1.common_pb2 import Role, Stage
from kvrouter.v1.scheduler_pb2 import RoutingRequest, SelectWorkerRequest, SelectWorkerResponse

log = structlog.get_logger(component="scheduler")


class Selector:
    """Chooses ranks and books on them."""

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
    ) -> None:
        """``predictions`` replace Indexers in approximate mode. ``max_queued_requests`` 0: no request is queued.

        ``is_behind`` tells whether callers had better spread their requests over other Schedulers as well.
        """
        self._pools = pools
        self._booking_table = booking_table
        self._booking_leases = booking_leases
        self._decisions = decisions
        self._thresholds = thresholds
        self._indexers = indexers
        self._options = options
        self._metrics = metrics
        self._indexer_timeout = indexer_timeout_seconds
        self._max_prompt_tokens = max_prompt_tokens
        self._rng = rng
        self._clock = clock
        self._predictions = predictions
        self._affinity = Affinity(0) if affinity is None else affinity
        self._is_behind = is_behind
        self._under_way: dict[Key, asyncio.Event] = {}
        self.queued = (
            QueuedRequests(self, metrics, max_queued_requests=max_queued_requests, clock=clock)
            if max_queued_requests
            else None
        )
        """Those that the policy holds; ``run`` must be running. None where nothing is held."""

    async def select(
        self, request: SelectWorkerRequest, *, session_id: str, deadline: Deadline, session_token: int | None = None
    ) -> SelectWorkerResponse:
        """Chooses a rank, and books it where the request names a booking.

        Args:
            request: The request.
            session_id: Session that is to own the booking; empty for a lease.
            deadline: The caller's.
            session_token: Stream of the session that asks; once another stream holds the session, nothing is booked.

        Raises:
            KvRouterError: the request is refused, or no rank can take it.
        """
        started = time.perf_counter()
        code, mode, queued_seconds = "OK", "", 0.0
        try:
            key = checked_key(request.booking) if request.HasField("booking") else None
            request_context = self.request_context(request.request, None if key is None else stage_of(request.booking))
            mode = request_context.options.mode
            booking_context = BookingContext(
                request_context, request.request, key, session_id, session_token, lease_seconds(request.lease_ms)
            )
            if key is None:
                response = await self._decide(booking_context, request, deadline)
            else:
                response = await self._book_once(booking_context, key, request, deadline)
            queued_seconds = response.queued_us / 1e6
            return response
        except KvRouterError as error:
            code = error.code.name
            raise
        finally:
            self._metrics.selections.labels(mode=mode, code=code).inc()
            self._metrics.select_seconds.observe(max(0.0, time.perf_counter() - started - queued_seconds))

    def request_context(
        self, request: RoutingRequest, stage: Stage | None, *, needs_worker: bool = True
    ) -> RequestContext:
        """Checks a request.

        Args:
            request: The request.
            stage: The stage to book; None for prefill at a component of prefill workers, else for the whole request.
            needs_worker: Whether a mode that takes the worker from the request is to insist on one.

        Raises:
            KvRouterError: it is refused.
        """
        pool = self._pools.find(request, stage or Stage.STAGE_WHOLE)
        if stage is None:
            stage = Stage.STAGE_PREFILL if pool.role == Role.ROLE_PREFILL else Stage.STAGE_WHOLE
        # Overrides go over what is set for the model, which goes over what was given at start.
        in_force = replace(self._options, thresholds=self._thresholds.of(pool.model))
        options = overridden(in_force, request.overrides)
        prompt = read_prompt(
            request,
            block_size=pool.booked_load.block_size,
            max_model_len=pool.max_model_len,
            max_prompt_tokens=self._max_prompt_tokens,
        )
        constraints = WorkerConstraints.of(request, stage)
        if needs_worker and POLICIES[options.mode].needs_worker and constraints.worker_id is None:
            raise BadRequest(
                f"mode {options.mode} needs a worker",
                field="constraints.worker_id",
                advice="Name the worker, or choose another mode.",
                known=sorted({candidate.rank[0] for candidate in pool.candidates}),
            )
        return RequestContext(pool, prompt, constraints, options)

    async def overlaps(self, request_context: RequestContext, deadline: Deadline, *, constraints: bool) -> Overlaps:
        """What the ranks hold of the prompt; nothing where that is not wanted."""
        if not constraints:
            return NOT_QUERIED
        if self._predictions is not None:
            return self._predictions.overlaps(request_context.pool, request_context.prompt)
        return await ask(
            self._indexers,
            request_context.pool.name,
            request_context.prompt,
            block_size=request_context.pool.booked_load.block_size,
            timeout_seconds=self._indexer_timeout,
            deadline=deadline,
        )

    def snapshot(self, request_context: RequestContext, overlaps: Overlaps) -> CandidateSnapshot:
        """Every candidate as it is at this moment."""
        return snapshot(
            request_context.pool,
            request_context.prompt,
            request_context.constraints,
            request_context.options,
            overlaps,
            now=self._clock(),
        )

    async def _book_once(
        self, booking_context: BookingContext, key: Key, request: SelectWorkerRequest, deadline: Deadline
    ) -> SelectWorkerResponse:
        """The first outcome for a key, however often and however concurrently it is asked for."""
        while True:
            repeated = self._repeated(booking_context, key)
            if repeated is not None:
                return repeated
            under_way = self._under_way.get(key)
            if under_way is None:
                break
            await under_way.wait()
        done = self._under_way[key] = asyncio.Event()
        try:
            return await self._decide(booking_context, request, deadline)
        finally:
            del self._under_way[key]
            done.set()

    def _repeated(self, booking_context: BookingContext, key: Key) -> SelectWorkerResponse | None:
        now = self._clock()
        booking, request_context = self._booking_table.find(key, now), booking_context.request_context
        if booking is None:
            return None
        if (
            booking.component != request_context.pool.name
            or booking.prompt.sequence_hashes != request_context.prompt.sequence_hashes
            or booking.prompt.tokens != request_context.prompt.tokens
        ):
            raise RequestIdReused(key[0])
        # Booked at another Scheduler, whose caller has come here.
        self._booking_leases.own(
            booking, booking_context.session_id, booking_context.lease_seconds, now, booking_context.session_token
        )
        self._metrics.repeated.inc()
        outcome = SelectWorkerResponse()
        outcome.CopyFrom(booking.outcome)
        outcome.repeated = True
        return outcome

    async def _decide(
        self, booking_context: BookingContext, request: SelectWorkerRequest, deadline: Deadline
    ) -> SelectWorkerResponse:
        request_context, key = booking_context.request_context, booking_context.key
        self._check(booking_context)
        booking_context.overlaps = await self.overlaps(
            request_context, deadline, constraints=request_context.options.queries_indexer
        )
        if booking_context.overlaps.failure:
            self._metrics.load_only.labels(reason=booking_context.overlaps.failure).inc()

        # From here to the booking nothing is awaited.
        chosen = self.choose(booking_context)
        if self.queued is None or key is None or not isinstance(chosen.decided, Wait):
            return self.settle(booking_context, chosen)
        self._keep(booking_context, self._decisions.next_id(), None, chosen, _waiting_reason(chosen))
        if request.time_left_ms:
            deadline = deadline.within(request.time_left_ms / 1e3)
        try:
            return await self.queued.enqueue(
                booking_context, key, chosen, chosen.decided, arrived_unix_ns=request.arrived_unix_ns, deadline=deadline
            )
        except (AllBusy, DeadlineExceeded) as error:
            self._keep(booking_context, self._decisions.next_id(), None, chosen, Explanation(str(error)))
            raise

    def choose(self, booking_context: BookingContext) -> Chosen:
        """Chooses by what is known at this moment.

        Raises:
            KvRouterError: the request cannot be booked any more, or no rank can take it.
        """
        request_context, pool = booking_context.request_context, booking_context.request_context.pool
        if self._pools.get(pool.name) is not pool:
            raise NoWorkers(f"{pool.name} has gone, or has another block size")
        self._check(booking_context)
        found = self.snapshot(request_context, booking_context.overlaps)
        if not found.free:
            refusal = found.refusal(pool.name)
            self._keep(booking_context, self._decisions.next_id(), None, found, Explanation(str(refusal)))
            raise refusal.untraced()
        rows = self._affinity.narrowed(pool.name, booking_context.routing, found.free)
        return choose(pool, request_context.prompt, request_context.options, found, rows, self._rng)

    def settle(
        self, booking_context: BookingContext, chosen: Chosen, *, queued_seconds: float = 0.0
    ) -> SelectWorkerResponse:
        """Books what was chosen in this same step, where the request is to be booked, and answers.

        Raises:
            KvRouterError: it cannot be booked.
        """
        request_context, key, candidate = booking_context.request_context, booking_context.key, chosen.row.candidate
        pool, decision_id = request_context.pool, self._decisions.next_id()
        response = answer(booking_context, chosen, decision_id, queued_seconds)
        response.sharding_advised = self._is_behind()
        if key is not None:
            response.prefill_tokens = chosen.prefill_tokens
            if not self._book(booking_context, key, chosen, response):
                return self._booked_meanwhile(booking_context, key)
        pool.previous[request_context.options.mode] = candidate.rank
        self._keep(booking_context, decision_id, chosen.row, chosen, chosen.decided.explanation, queued_seconds)
        return response

    def _book(self, booking_context: BookingContext, key: Key, chosen: Chosen, response: SelectWorkerResponse) -> bool:
        request_context, prompt = booking_context.request_context, booking_context.request_context.prompt
        queried_indexer = request_context.options.queries_indexer and not booking_context.overlaps.failure
        booking = Booking(
            key,
            request_context.pool,
            prompt if self._predictions is not None else replace(prompt, local_hashes=b""),
            Placement(chosen.row.candidate.rank, chosen.prefill_tokens),
            response,
            audited=queried_indexer and request_context.constraints.stage != Stage.STAGE_DECODE,
            session_id=booking_context.session_id,
            lease_seconds=booking_context.lease_seconds,
            conversation=conversation_of(booking_context.routing),
        )
        return self._booking_leases.book(booking, self._clock(), forecast_ms=chosen.forecast_ms)

    def _booked_meanwhile(self, booking_context: BookingContext, key: Key) -> SelectWorkerResponse:
        """The outcome at another Scheduler, heard of while the request was decided here."""
        repeated = self._repeated(booking_context, key)
        if repeated is None:
            raise BookingFreed(key[0])
        return repeated

    async def refresh(self, booking_context: BookingContext) -> None:
        """Asks for the overlaps of a request anew; an answer that cannot be had leaves the old one."""
        overlaps = await self.overlaps(
            booking_context.request_context,
            Deadline.never(),
            constraints=booking_context.request_context.options.queries_indexer,
        )
        if not overlaps.failure:
            booking_context.overlaps = overlaps

    def _check(self, booking_context: BookingContext) -> None:
        pool = booking_context.request_context.pool
        if booking_context.key is not None:
            self._booking_leases.check_bookable(
                booking_context.key, booking_context.session_id, booking_context.session_token
            )
        if not pool.candidates:
            raise NoWorkers(f"{pool.name} has no live worker")
        check_pinned(pool.candidates, booking_context.request_context.constraints)

    def _keep(
        self,
        booking_context: BookingContext,
        decision_id: int,
        row: CandidateRow | None,
        seen: Chosen | CandidateSnapshot,
        explanation: Explanation,
        queued_seconds: float = 0.0,
    ) -> None:
        request_id, attempt = ("", 0) if booking_context.key is None else booking_context.key[:2]
        found, context = (seen, None) if isinstance(seen, CandidateSnapshot) else (seen.found, seen.context)
        decided = Decided(
            decision_id=decision_id,
            component=booking_context.request_context.pool.name,
            request_id=request_id,
            attempt=attempt,
            mode=booking_context.request_context.options.mode,
            chosen=None if row is None else row.candidate.rank,
            context=context,
            explanation=explanation,
            excluded=partial(found.excluded, () if context is None else context.ranks),
            rows=len(found.worker_set),
            prompt_blocks=booking_context.request_context.prompt.blocks,
            load_only=bool(booking_context.overlaps.failure),
            decided_unix_ns=time.time_ns(),
            queued_seconds=queued_seconds,
        )
        self._decisions.add(decided)
        if context is not None and log.is_enabled_for(logging.DEBUG):
            for index in range(len(context.ranks)):
                formula = explanation.formula(index)
                if formula:
                    log.debug("decision.formula", formula=formula, decision=decision_id, request_id=request_id)


def _waiting_reason(chosen: Chosen) -> Explanation:
    why = chosen.decided.explanation
    return replace(why, reason=f"queued for {rank_label(chosen.row.candidate.rank)}: {why.reason}")
