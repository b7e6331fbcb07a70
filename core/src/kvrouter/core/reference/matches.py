"""Reads the answers of Indexers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from google.protobuf.message import DecodeError
from kvrouter.core.interface import Matches
from kvrouter.v1.indexer_pb2 import FindMatchesResponse


def read_matches(answer: bytes, most_blocks: int) -> Matches:
    """Reads an encoded FindMatchesResponse. Numbers of blocks are limited to ``most_blocks``.

    Raises:
        ValueError: it is malformed, or columns of lower tiers differ in length.
    """
    try:
        message = FindMatchesResponse.FromString(answer)
    except DecodeError:
        raise ValueError("expected an encoded FindMatchesResponse") from None

    def row(blocks: Sequence[int]) -> bytes:
        return array("q", [min(number, most_blocks) for number in blocks]).tobytes()

    ranks = FindMatchesResponse(
        worker_ids=message.worker_ids, dp_ranks=message.dp_ranks, incarnations=message.incarnations
    )
    device, *lower = message.device_blocks, message.host_blocks, message.disk_blocks, message.shared_blocks
    rows = None
    if message.shared_blocks and message.shared_blocks != device:
        if len(set(map(len, lower))) != 1:
            raise ValueError("expected columns of one length for the lower tiers")
        rows = b"".join(map(row, lower))
    event_ids = array("Q", message.next_event_ids).tobytes()
    return ranks.SerializeToString(), row(device), rows, min(message.pooled_blocks, most_blocks), event_ids
