"""Messages about the routing of a request: for the Scheduler, and for the client."""

from __future__ import annotations

from collections.abc import Sequence

from kvrouter.frontend.request.prefill_stage import PrefillStage
from kvrouter.frontend.schedulers.live_bookings import LiveBooking
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.runtime.packed_hashes import local_hashes_message
from kvrouter.v1.common_pb2 import Rank, RoutingRequest
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest, RoutedOn, RoutingInfo
from kvrouter.v1.scheduler_pb2 import SelectWorkerResponse


def routing_info(
    request_id: str,
    booking: LiveBooking,
    selection: SelectWorkerResponse,
    *,
    added_us: int,
    earlier_ranks: Sequence[Rank],
    migrations: int,
    inexact: bool,
    prefill: PrefillStage | None,
) -> RoutingInfo:
    """Returns how an attempt was routed.

    Args:
        request_id: The client's id of the request.
        booking: The booking of the attempt.
        selection: The decision.
        added_us: Time since the arrival of the request or the failure of the worker before, microseconds.
        earlier_ranks: Ranks of the attempts before.
        migrations: Migrations before.
        inexact: Whether a continuation on another worker may differ from the output the first one would have had.
        prefill: The prefill stage; None if the pool is not disaggregated.
    """
    routing = RoutingInfo(
        request_id=request_id,
        rank=selection.rank,
        component=selection.component,
        attempt=booking.key.attempt,
        predicted_overlap_blocks=selection.overlap_blocks,
        prompt_blocks=selection.prompt_blocks,
        decision_id=selection.decision_id,
        load_only=selection.load_only,
        routed_on=RoutedOn.ROUTED_ON_LOAD if selection.load_only else RoutedOn.ROUTED_ON_TOKENS,
        router_us=added_us,
        queued_us=selection.queued_us,
        mode=selection.mode,
    )
    if selection.ignored_overrides:
        routing.ignored_overrides.extend(selection.ignored_overrides)
    if earlier_ranks:
        routing.earlier_ranks.extend(earlier_ranks)
        routing.migrations = migrations
        routing.inexact_continuation = migrations > 0 and inexact
    if prefill is not None:
        routing.prefill_reason = prefill.reason
        routing.prefill_us = prefill.spent_ns // 1000
        if prefill.rank is not None:
            routing.prefill_rank.CopyFrom(prefill.rank)
    return routing


def routing_request(
    request: FrontendServiceGenerateRequest,
    view: ComponentView,
    local_hashes: bytes,
    prompt_tokens: int,
    *,
    is_estimated: bool = False,
) -> RoutingRequest:
    """Returns a request for a Scheduler: hashes, lengths and options, no tokens.

    ``is_estimated``: whether the number of prompt tokens is an estimate.
    """
    routing = RoutingRequest(
        model=request.model,
        component=view.descriptor.component,
        local_hashes=local_hashes_message(local_hashes),
        prompt_tokens=prompt_tokens,
        block_size=view.descriptor.block_size,
        conversation_id=request.conversation_id,
        priority=request.priority,
        max_output_tokens=request.stop_conditions.max_tokens,
        length_is_estimated=is_estimated,
    )
    if request.HasField("scope"):
        routing.scope.CopyFrom(request.scope)
    if request.HasField("overrides"):
        routing.overrides.CopyFrom(request.overrides)
    if request.HasField("constraints"):
        routing.constraints.CopyFrom(request.constraints)
    if request.sampling_options.HasField("structured_output"):
        unable = (worker.worker_id for worker in view.workers.values() if not worker.serves_structured_output)
        routing.constraints.excluded_worker_ids.extend(unable)
    return routing
