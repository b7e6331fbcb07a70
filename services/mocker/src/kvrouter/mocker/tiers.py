"""The engine's cache tiers in the contract."""

from __future__ import annotations

from collections.abc import Mapping

from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.mocker.engine.types import CacheTier
from kvrouter.v1.common_pb2 import Tier
from kvrouter.v1.registry_pb2 import StorageTier

TIERS: Mapping[int, Tier] = {
    CacheTier.DEVICE: Tier.TIER_DEVICE,
    CacheTier.HOST: Tier.TIER_HOST,
    CacheTier.SHARED: Tier.TIER_SHARED,
}
"""Tier of the contract of each tier of the engine."""


def storage_tiers(config: EngineConfig) -> list[StorageTier]:
    """Returns the tiers of an engine below device memory, as its worker registers them."""
    tiers = ((Tier.TIER_HOST, config.host), (Tier.TIER_SHARED, config.shared))
    return [StorageTier(tier=tier, load_gb_per_second=each.gb_per_second) for tier, each in tiers if each.num_blocks]
