"""The routing request of a generation request."""

from __future__ import annotations

from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.runtime.packed_hashes import local_hashes_message
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest
from kvrouter.v1.scheduler_pb2 import RoutingRequest


def routing_request(
    request: FrontendServiceGenerateRequest,
    view: ComponentView,
    local_hashes: bytes,
    prompt_tokens: int,
    *,
    is_estimated: bool = False,
) -> RoutingRequest:
    """Returns what a Scheduler needs of a request: hashes, lengths and options, no tokens.

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
