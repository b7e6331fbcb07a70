"""An index as a list of events, in the JSON form of Dynamo's router."""

from __future__ import annotations

from typing import Any

from kvrouter.v1.indexer_pb2 import RankState


def rank_events(state: RankState) -> list[dict[str, Any]]:
    """Returns one stored event for each block of a part of a rank's state, parents before children."""
    return [
        {
            "worker_id": state.rank.worker_id,
            "event": {
                "event_id": number,
                "data": {
                    "stored": {
                        "parent_hash": block.parent_engine_hash if block.HasField("parent_engine_hash") else None,
                        "blocks": [{"block_hash": block.engine_hash, "tokens_hash": block.local_hash}],
                    }
                },
                "dp_rank": state.rank.dp_rank,
            },
        }
        for number, block in enumerate(state.blocks)
    ]
