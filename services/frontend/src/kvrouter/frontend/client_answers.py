"""Builds the answers of clients' routing calls from those of Schedulers and Indexers.

The public messages are others than the internal ones, so that the internal ones may change.
"""

from __future__ import annotations

from kvrouter.v1.common_pb2 import Cursor, Rank
from kvrouter.v1.frontend_pb2 import FrontendServiceFindMatchesResponse, RankOverlap, Selection
from kvrouter.v1.indexer_pb2 import FindMatchesResponse
from kvrouter.v1.scheduler_pb2 import SelectWorkerResponse


def selection_of(response: SelectWorkerResponse) -> Selection:
    """Returns a Scheduler's choice."""
    return Selection(
        rank=response.rank,
        endpoint=response.endpoint,
        overlap_blocks=response.overlap_blocks,
        prompt_blocks=response.prompt_blocks,
        decision_id=response.decision_id,
        load_only=response.load_only,
        repeated=response.repeated,
        component=response.component if response.HasField("component") else None,
        mode=response.mode,
        role=response.role,
        queued_us=response.queued_us,
        prefill_tokens=response.prefill_tokens if response.HasField("prefill_tokens") else None,
        ignored_overrides=response.ignored_overrides,
        prefill=response.prefill if response.HasField("prefill") else None,
    )


def overlaps_of(response: FindMatchesResponse) -> FrontendServiceFindMatchesResponse:
    """Returns what an Indexer says of each rank."""
    columns = zip(
        response.worker_ids,
        response.dp_ranks,
        response.device_blocks,
        response.host_blocks,
        response.disk_blocks,
        response.shared_blocks,
        response.incarnations,
        response.next_event_ids,
        response.partial,
        strict=True,
    )
    return FrontendServiceFindMatchesResponse(
        overlaps=(
            RankOverlap(
                rank=Rank(worker_id=worker_id, dp_rank=dp_rank),
                device_blocks=device,
                host_blocks=host,
                disk_blocks=disk,
                shared_blocks=shared,
                cursor=Cursor(incarnation=incarnation, next_event_id=next_event_id),
                partial=partial,
            )
            for worker_id, dp_rank, device, host, disk, shared, incarnation, next_event_id, partial in columns
        ),
        prompt_blocks=response.prompt_blocks,
    )
