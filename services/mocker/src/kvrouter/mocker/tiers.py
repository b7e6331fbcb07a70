"""The engine's cache tiers in the contract."""

from __future__ import annotations

from collections.abc import Mapping

from kvrouter.mocker.engine.types import CacheTier
from kvrouter.v1.common_pb2 import Tier

TIERS: Mapping[int, Tier] = {
    CacheTier.DEVICE: Tier.TIER_DEVICE,
    CacheTier.HOST: Tier.TIER_HOST,
    CacheTier.SHARED: Tier.TIER_SHARED,
}
"""Tier of the contract of each tier of the engine."""
