"""Parses an event batch once, for its readers and for its index."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from kvrouter.core.interface import Rank, RefusedBatch
from kvrouter.core.reference.event_rules import LAST_EVENT_ID
from kvrouter.v1.common_pb2 import Tier
from kvrouter.v1.events_pb2 import KvEventBatch

_BYTES_PER_EVENT = 200


class EventBatch:
    """Implements ``kvrouter.core.interface.EventBatch``."""

    def __init__(self, data: bytes, rank: Rank | None = None, block_size: int | None = None) -> None:
        try:
            self.message = KvEventBatch.FromString(data)
        except DecodeError as error:
            raise RefusedBatch(
                "unparsable", f"expected a KvEventBatch, received {len(data)} bytes: {error or 'malformed'}"
            ) from None
        if rank not in (None, self.rank):
            raise RefusedBatch("rank", f"expected a batch of rank {rank}, received one of rank {self.rank}")
        if block_size not in (None, self.message.block_size):
            raise RefusedBatch(
                "block_size",
                f"expected blocks of {block_size} tokens, received blocks of {self.message.block_size}",
            )
        self._bytes = len(data)

    @property
    def rank(self) -> Rank:
        """Returns the rank of the events."""
        return (self.message.worker_id, self.message.dp_rank)

    @property
    def incarnation(self) -> int:
        """Returns the rank's incarnation."""
        return self.message.incarnation

    @property
    def next_event_id(self) -> int:
        """Returns the id of the event after the batch, as the batch states it."""
        return self.message.next_event_id

    @property
    def reached(self) -> int:
        """Returns the higher of ``next_event_id`` and the highest event id plus one."""
        after = max((event.event_id + 1 for event in self.message.events), default=0)
        return min(max(after, self.message.next_event_id), LAST_EVENT_ID)

    @property
    def events(self) -> int:
        """Returns the number of events."""
        return len(self.message.events)

    @property
    def clears_all(self) -> bool:
        """Returns whether an event clears every tier."""
        return any(
            event.WhichOneof("change") == "cleared" and event.tier == Tier.TIER_UNSPECIFIED
            for event in self.message.events
        )

    @property
    def published_unix_ns(self) -> int:
        """Returns the time of publication, nanoseconds since 1970."""
        return self.message.published_unix_ns

    @property
    def memory_bytes(self) -> int:
        """Returns the estimated memory of the parsed batch and its encoded form, in bytes."""
        return 2 * self._bytes + _BYTES_PER_EVENT * self.events
