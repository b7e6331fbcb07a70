"""Takes a request from its context to its booked response.

``decide`` and ``settle`` form one step: between the snapshot of the load and the booking nothing is awaited. Requests
of one moment thus see each other's load, one after the other, and spread instead of meeting at the idle rank.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from random import Random
from types import MappingProxyType

from kvrouter.core import Rank
from kvrouter.runtime.booking_updates import Key
from kvrouter.runtime.deadline import Deadline
from kvrouter.scheduler.bookings.booking import Booking, Placement
from kvrouter.scheduler.bookings.conversations import Conversations, HeldBlocks
from kvrouter.scheduler.bookings.ownership import BookingFreed, BookingOwnership
from kvrouter.scheduler.identifiers import component_message, rank_message
from kvrouter.scheduler.load.pools import Pool, Pools
from kvrouter.scheduler.metrics import SchedulerMetrics
from kvrouter.scheduler.overlap.indexer_query import NOT_QUERIED, IndexerSource, Overlaps, ask
from kvrouter.scheduler.overlap.predictions import Predictions
from kvrouter.scheduler.request.prompt import Prompt
from kvrouter.scheduler.routing.context import RequestContext
from kvrouter.scheduler.routing.decide import Decision, Decisions, decide
from kvrouter.scheduler.workers.candidates import check_pinned
from kvrouter.v1.common_pb2 import Role
from kvrouter.v1.errors import NoWorkers, RequestIdReused
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import SelectWorkerResponse
from msgspec.structs import replace

_TEMPLATES = 4096
"""Responses to keep encoded: one for each rank and mode in use."""


@dataclass(eq=False)
class Router:
    """Decides where requests go, and books them there.

    ``predictions`` replace Indexers in approximate mode, and for ranks without events.

    ``is_behind`` returns whether this Scheduler is overloaded, which advises callers to shard their requests.
    """

    pools: Pools
    booking_ownership: BookingOwnership
    decisions: Decisions
    """Recent decisions, for Explain."""
    indexers: IndexerSource
    metrics: SchedulerMetrics
    _: KW_ONLY
    indexer_timeout_seconds: float
    rng: Random
    clock: Callable[[], float]
    conversations: Conversations
    predictions: Predictions | None = None
    is_behind: Callable[[], bool] = lambda: False

    async def overlaps(self, context: RequestContext, deadline: Deadline, *, needed: bool | None = None) -> Overlaps:
        """Returns the overlaps of the prompt with every rank, those of prefill workers included.

        Failures of Indexers are part of the result. ``needed`` defaults to whether the request's mode uses overlaps.
        """
        if not (context.options.queries_indexer if needed is None else needed):
            return NOT_QUERIED
        elsewhere = context.prefill_pools
        if not elsewhere or context.prompt.tokens < context.options.remote_prefill.min_tokens:
            return await self._overlaps_in(context.pool, context.prompt, deadline)
        own, *others = await asyncio.gather(
            *(self._overlaps_in(pool, context.prompt, deadline) for pool in (context.pool, *elsewhere))
        )
        return replace(own, prefill={pool.name: each for pool, each in zip(elsewhere, others, strict=True)})

    async def _overlaps_in(self, pool: Pool, prompt: Prompt, deadline: Deadline) -> Overlaps:
        predictions = self.predictions
        if predictions is not None and predictions.all_of(pool):
            return predictions.overlaps(pool, prompt)
        found = await ask(
            self.indexers,
            pool.name,
            prompt,
            block_size=pool.booked_load.block_size,
            timeout_seconds=self.indexer_timeout_seconds,
            deadline=deadline,
        )
        if predictions is None or not predictions.concern(pool, prompt):
            return found
        predicted = predictions.overlaps(pool, prompt)
        if prompt.indexed_blocks is not None:
            found = found.extended(predicted, prompt.indexed_blocks)
        return found.with_predicted(predicted) if predictions.some_of(pool) else found

    def conversation(self, context: RequestContext) -> HeldBlocks | None:
        """Returns what the last request of the conversation left for this one; None without one."""
        return self.conversations.held(context.pool.name, context.conversation, context.prompt)

    def decide(
        self,
        context: RequestContext,
        overlaps: Overlaps,
        *,
        queued_tokens: Mapping[Rank, int] = MappingProxyType({}),
        is_recorded: bool = True,
    ) -> Decision:
        """Decides from the current state.

        Args:
            context: The request.
            overlaps: Overlaps of its prompt.
            queued_tokens: KV cache in tokens that the largest request queued for each rank will add; empty if this one
                was queued itself.
            is_recorded: Whether Explain may show a refusal.

        Raises:
            KvRouterError: the request can no longer be booked, or no rank can take it.
        """
        pool, booking = context.pool, context.booking
        if self.pools.get(pool.name) is not pool:
            raise NoWorkers(f"{pool.name} has gone, or has another block size")
        if booking.key is not None:
            self.booking_ownership.check_bookable(booking.key, booking.session_id, booking.opening_number)
        if not pool.candidates:
            raise NoWorkers(f"{pool.name} has no live worker", resource_name=pool.name)
        if not context.constraints.anywhere:
            check_pinned(pool.candidates, context.constraints, pool.name)
        expected = context.expected_output_tokens
        decision = decide(
            context,
            overlaps,
            rng=self.rng,
            now=self.clock(),
            decision_id=next(self.decisions.ids),
            queued_tokens=queued_tokens,
            conversation=self.conversation(context) if context.conversation else None,
            expected_output_tokens=expected
            or self.conversations.expected_output_tokens(pool, context.conversation, context.tenant.name),
        )
        if decision.verdict is None:
            refusal = decision.snapshot.refusal(pool.name)
            if is_recorded:
                self.decisions.add(decision.refused(refusal))
            raise refusal.untraced()
        return decision

    def settle(self, context: RequestContext, overlaps: Overlaps, decision: Decision) -> SelectWorkerResponse:
        """Books the rank of a decision made in the same step, if the request names a booking. Returns the response.

        Raises:
            KvRouterError: it cannot be booked.
        """
        key, rank = context.booking.key, decision.rank
        response = selection_response(decision, overlaps)
        if self.is_behind():
            response.sharding_advised = True
        if context.ignored_overrides:
            response.ignored_overrides.extend(context.ignored_overrides)
        if key is not None and not self._book(context, key, rank, decision, response):
            repeated = self.earlier_outcome(context, key)  # at another Scheduler, which announced it meanwhile
            if repeated is None:
                raise BookingFreed(key[0])
            return repeated
        context.pool.previous[decision.mode] = rank
        self.decisions.add(decision)
        return response

    def _book(
        self,
        context: RequestContext,
        key: Key,
        rank: Rank,
        decision: Decision,
        response: SelectWorkerResponse,
    ) -> bool:
        """Books a request on the decided rank. Returns False if its key is already booked."""
        response.prefill_tokens = decision.prefill_tokens
        pool, prompt, options = context.pool, context.prompt, context.booking
        is_predicted = self.predictions is not None and self.predictions.concern(pool, prompt)
        queried_indexer = context.options.queries_indexer and not decision.load_only
        booking = Booking(
            key,
            pool,
            prompt if is_predicted else replace(prompt, local_hashes=b""),
            Placement(rank, decision.prefill_tokens),
            response,
            audited=queried_indexer and prompt.indexed_blocks is None and not decision.is_prefilled_remotely,
            most_overlap_blocks=decision.snapshot.live_overlap(is_retry=key[1] > 0),
            expected=decision.expected(context),
            session_id=options.session_id,
            lease_seconds=options.lease_seconds,
            conversation=context.conversation,
            tenant=context.tenant.name,
            expected_output_tokens=decision.expected_output_tokens,
        )
        if not self.booking_ownership.book(booking, self.clock()):
            return False
        if queried_indexer:
            candidates, place = decision.snapshot, decision.place
            reachable, lower = candidates.reachable_tokens(place), candidates.lower_of(place)
            self.metrics.count_cached(pool.model, reachable, lower, candidates.block_size)
        return True

    def earlier_outcome(self, context: RequestContext, key: Key) -> SelectWorkerResponse | None:
        """Returns the response to an earlier selection with the same key; None if there was none.

        A client repeats a selection, here or at another Scheduler, when it lost the response.

        Raises:
            RequestIdReused: the key is booked for another prompt or component, or was freed.
            SessionLost: the session of the call is closed.
        """
        now = self.clock()
        booking = self.booking_ownership.booking_table.find(key, now)
        if booking is None:
            return None
        if (
            booking.component != context.pool.name
            or booking.prompt.sequence_hashes != context.prompt.sequence_hashes
            or booking.prompt.tokens != context.prompt.tokens
        ):
            raise RequestIdReused(key[0])
        # Booked at another Scheduler, whose caller has come here.
        options = context.booking
        self.booking_ownership.own(booking, options.session_id, options.lease_seconds, now, options.opening_number)
        self.metrics.repeated.inc()
        outcome = SelectWorkerResponse()
        outcome.CopyFrom(booking.outcome)
        outcome.repeated = True
        return outcome


def selection_response(decision: Decision, overlaps: Overlaps) -> SelectWorkerResponse:
    """Returns the response for a decision made from ``overlaps``."""
    snapshot, place = decision.snapshot, decision.place
    candidate = snapshot.worker_set.candidates[place]
    # To parse what is the same for each request of a rank takes a fifth of the time of building it from its parts.
    response = SelectWorkerResponse.FromString(
        _template(candidate.rank, candidate.endpoint, candidate.role, decision.component, decision.mode)
    )
    response.overlap_blocks = snapshot.overlap_blocks.item(place)
    response.prompt_blocks = decision.prompt_blocks
    response.decision_id = decision.decision_id
    if decision.load_only:
        response.load_only = True
    if decision.queued_seconds:
        response.queued_us = int(decision.queued_seconds * 1e6)
    if snapshot.prefill is not None and (prefill := decision.prefill) is not None:
        response.prefill.CopyFrom(prefill)
    if (lower := snapshot.lower_of(place)) is not None:
        response.lower_blocks.CopyFrom(lower)
    if (source := snapshot.kv_source(place)) is not None:
        response.kv_source.CopyFrom(source)
    overlaps.write_cursor(candidate.rank, response)
    return response


@lru_cache(maxsize=_TEMPLATES)
def _template(rank: Rank, endpoint: str, role: Role, component: ComponentName, mode: str) -> bytes:
    return SelectWorkerResponse(
        rank=rank_message(rank), endpoint=endpoint, role=role, component=component_message(component), mode=mode
    ).SerializeToString()
