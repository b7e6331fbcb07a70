"""Validates single events, independent of the state of the rank."""

from __future__ import annotations

from kvrouter.core.interface import MAX_EVENT_BLOCKS
from kvrouter.v1.common_pb2 import Tier
from kvrouter.v1.events_pb2 import KvEvent

LAST_EVENT_ID = (1 << 64) - 1
"""Not a valid event id, because the cursor cannot pass it."""

MAX_DEPTH = (1 << 32) - 1


def fault(event: KvEvent) -> str:
    """Returns why an event is rejected; empty if it is valid."""
    if event.event_id == LAST_EVENT_ID:
        return "expected an id below 2^64 - 1"
    if not Tier.TIER_UNSPECIFIED <= event.tier <= Tier.TIER_CHECKPOINT:
        return f"unknown tier {event.tier}"
    change = event.WhichOneof("change")
    if change is None:
        return "it has no change"
    if change == "cleared":
        return ""
    engine_hashes = event.stored.engine_hashes if change == "stored" else event.removed.engine_hashes
    if not engine_hashes:
        return "it has no blocks"
    if len(engine_hashes) > MAX_EVENT_BLOCKS:
        return f"expected at most {MAX_EVENT_BLOCKS} blocks, received {len(engine_hashes)}"
    if change == "removed":
        return ""
    stored = event.stored
    if len(stored.local_hashes) != len(engine_hashes):
        return f"it has {len(engine_hashes)} engine hashes and {len(stored.local_hashes)} local hashes"
    if len(set(engine_hashes)) != len(engine_hashes):
        return "it has an engine hash twice"
    if "parent_engine_hash" in stored and stored.parent_engine_hash in engine_hashes:
        return "a block is its own parent"
    return ""


def tier_of(event: KvEvent) -> Tier:
    """Returns the tier of a ``stored`` or ``removed`` event."""
    return event.tier or Tier.TIER_DEVICE
