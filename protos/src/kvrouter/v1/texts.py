"""Values of the contract as people read them: in responses, headers, metrics and tables."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

from kvrouter.v1.common_pb2 import LowerTiers, Rank

LOWER_TIER_NAMES = tuple(LowerTiers.DESCRIPTOR.fields_by_name)
"""Names of the tiers below device memory, from the fastest."""
_MAX_TEXTS = 256
"""Texts to keep: more than all enums have values."""


class Enum(Protocol):
    """An enum of the contract."""

    def Name(self, number: int) -> str:  # noqa: N802 - protobuf's name
        """Returns the name of a value."""


@lru_cache(maxsize=_MAX_TEXTS)
def text_of(enum: Enum, value: int) -> str:
    """Returns the name of an enum's value without that of the enum: ``host`` for TIER_HOST."""
    prefix = enum.Name(0).removesuffix("UNSPECIFIED")
    return enum.Name(value).removeprefix(prefix).lower()


def rank_text(rank: Rank) -> str:
    """Returns a rank as ``worker:rank``."""
    return f"{rank.worker_id}:{rank.dp_rank}"


def by_tier(lower: LowerTiers) -> dict[str, int]:
    """Returns the numbers below device memory by tier, the fastest first."""
    return {tier: getattr(lower, tier) for tier in LOWER_TIER_NAMES}
