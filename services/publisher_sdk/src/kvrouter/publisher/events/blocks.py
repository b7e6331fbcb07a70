"""What is recorded of a rank's blocks, and of the events that changed them."""

from __future__ import annotations

from typing import NamedTuple

from kvrouter.core import Scope
from kvrouter.publisher.errors import InvalidEvent
from kvrouter.v1.common_pb2 import Tier

BASE_SCOPE = Scope()
"""Scope of blocks without adapter, salt and tenant."""

TIERS = (Tier.TIER_DEVICE, Tier.TIER_HOST, Tier.TIER_DISK, Tier.TIER_SHARED)
"""The tiers, in the order of ``Block.copies``."""


class Block(NamedTuple):
    """A resident block."""

    parent: int | None
    """Engine hash of the parent block when this block was stored; None at the start of a sequence."""
    parent_place: int
    """Sequence hash of the parent block; 0 at the start of a sequence."""
    local_hash: int
    sequence_hash: int
    depth: int
    """Position in the sequence, from 0."""
    copies: tuple[int, ...]
    """Physical copies in device memory, host memory, disk and shared storage."""
    scope: Scope = BASE_SCOPE
    """Scope of its sequence, which its children inherit."""
    parts: int = 1
    """Number of blocks that its engine's block consists of; above 1, this is the last of them."""


class BlockNote(NamedTuple):
    """Scope and parts of blocks, which their records in the contract do not have."""

    scope: Scope
    parts: int
    engine_hashes: list[int]


class NumberedEvent(NamedTuple):
    """An encoded event with its id."""

    event_id: int
    encoded: bytes
    """A KvEvent."""
    digest: int
    """Digest of the rank's state after the event."""


def tier_index(tier: Tier) -> int:
    """Returns the place of a tier in ``TIERS``.

    Raises:
        InvalidEvent: the tier is unknown.
    """
    try:
        return TIERS.index(tier)
    except ValueError:
        raise InvalidEvent(f"expected device, host, disk or shared as the tier, received {tier}") from None
