"""Serves a selection: reads the request, queries overlaps, and lets the queue dispatch it.

All selections with the same booking key have one outcome: a client repeats a selection when it lost the response.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from kvrouter.runtime.booking_updates import Key
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.tracing import current_span
from kvrouter.scheduler.api.request_reader import RequestReader
from kvrouter.scheduler.identifiers import rank_message
from kvrouter.scheduler.metrics import SchedulerMetrics
from kvrouter.scheduler.policies.interface import Wait
from kvrouter.scheduler.queue.queued_requests import QueuedRequests
from kvrouter.scheduler.routing.context import RequestContext
from kvrouter.scheduler.routing.router import Router, selection_response
from kvrouter.scheduler.routing.snapshot import snapshot
from kvrouter.scheduler.workers.candidates import check_pinned
from kvrouter.v1 import scheduler_pb2 as pb
from kvrouter.v1.common_pb2 import PotentialLoad
from kvrouter.v1.errors import BadRequest, KvRouterError


@dataclass(eq=False)
class Selector:
    """Answers selections."""

    reader: RequestReader
    router: Router
    queued: QueuedRequests
    metrics: SchedulerMetrics
    _under_way: dict[Key, asyncio.Event | None] = field(default_factory=dict, init=False)
    """Running selections, each with the event of its end if a repeated one waits for it."""

    async def select(self, request: pb.SelectWorkerRequest, *, deadline: Deadline) -> pb.SelectWorkerResponse:
        """Chooses a rank, and books it if the request names a booking.

        Args:
            request: The request. If its session was opened again since, nothing is booked.
            deadline: The caller's deadline.

        Raises:
            KvRouterError: the request is refused, or no rank can take it.
        """
        started = time.perf_counter()
        code, mode, queued_seconds = "OK", "", 0.0
        try:
            context = self.reader.read_selection(request)
            mode = context.options.mode
            response = await self._select_once(context, request, deadline)
            queued_seconds = response.queued_us / 1e6
            if (span := current_span()).recording and (decision := self.router.decisions.by_id(response.decision_id)):
                span.set(decision.span_attributes())
            return response
        except KvRouterError as error:
            code = error.code.name
            raise
        finally:
            self.metrics.selections.of(mode, code).value += 1
            self.metrics.select_seconds.observe(max(0.0, time.perf_counter() - started - queued_seconds))

    async def _select_once(
        self, context: RequestContext, request: pb.SelectWorkerRequest, deadline: Deadline
    ) -> pb.SelectWorkerResponse:
        """Returns the outcome of the first selection with the key of the booking, if there is one."""
        key = context.booking.key
        if key is not None:
            while (earlier := self.router.earlier_outcome(context, key)) is None and key in self._under_way:
                ended = self._under_way[key] = self._under_way[key] or asyncio.Event()
                await ended.wait()
            if earlier is not None:
                return earlier
            self._under_way[key] = None
        try:
            overlaps = await self.router.overlaps(context, deadline)
            if overlaps.failure:
                self.metrics.load_only.labels(reason=overlaps.failure).inc()
            return await self.queued.dispatch(context, overlaps, request, deadline)
        finally:
            if key is not None and (awaited := self._under_way.pop(key)) is not None:
                awaited.set()

    async def compare(self, request: pb.SelectWorkerRequest, *, deadline: Deadline) -> pb.SelectWorkerResponse:
        """Returns the choice in one component with its cost, for callers with a choice of components.

        Raises:
            KvRouterError: the request is refused, or no rank can take it.
        """
        if "booking" in request:
            raise BadRequest(
                "compares: a comparison books nothing", field="booking", advice="Leave booking or compares out."
            )
        context = self.reader.read_request(request.request)
        overlaps = await self.router.overlaps(context, deadline)
        queued_tokens = self.queued.queued_tokens(context.pool.name)
        decision = self.router.decide(context, overlaps, queued_tokens=queued_tokens, is_recorded=False)
        response = selection_response(decision, overlaps)
        costs = decision.explanation.costs
        if len(costs) and decision.verdict is not None and decision.context is not None:
            tokens = decision.context.block_size if decision.explanation.counts_blocks else 1
            response.cost = float(costs[decision.verdict.index]) * tokens
        response.would_queue = isinstance(decision.verdict, Wait)
        conversation = self.router.conversation(context)
        response.keeps_conversation = conversation is not None and decision.rank == conversation.rank
        return response

    async def potential_loads(
        self, request: pb.GetPotentialLoadsRequest, *, deadline: Deadline
    ) -> pb.GetPotentialLoadsResponse:
        """Returns the load of each fitting rank with the request.

        Raises:
            KvRouterError: the request is refused.
        """
        context = self.reader.read_request(request.request, needs_worker=False)
        check_pinned(context.pool.candidates, context.constraints, context.pool.name)
        overlaps = await self.router.overlaps(context, deadline, needed=context.options.overlap_score_weight > 0)
        candidates = snapshot(context, overlaps, now=self.router.clock())
        loads = candidates.loads
        return pb.GetPotentialLoadsResponse(
            loads=[
                PotentialLoad(
                    rank=rank_message(candidates.worker_set.ranks[place]),
                    potential_prefill_tokens=int(loads.prefill_tokens[place] + candidates.new_prefill_tokens[place]),
                    potential_decode_blocks=int(loads.active_blocks[place]),
                    overlap_blocks=int(candidates.overlap_blocks[place]),
                    busy=bool(candidates.why_busy(place)),
                    active_requests=int(loads.requests[place]),
                )
                for place in candidates.fit.tolist()
            ]
        )
