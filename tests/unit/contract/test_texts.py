"""Values of the contract as text."""

from __future__ import annotations

from kvrouter.v1.common_pb2 import LowerTiers, Tier
from kvrouter.v1.frontend_pb2 import RoutedOn
from kvrouter.v1.texts import by_tier, text_of
from kvrouter.v1.worker_pb2 import FinishReason


def test_a_value_loses_the_name_of_its_enum() -> None:
    assert text_of(Tier, Tier.TIER_HOST) == "host"
    assert text_of(RoutedOn, RoutedOn.ROUTED_ON_LOAD) == "load"
    assert text_of(FinishReason, FinishReason.FINISH_REASON_TOOL_CALLS) == "tool_calls"
    assert text_of(Tier, 0) == "unspecified"


def test_tiers_come_from_the_fastest_to_the_slowest() -> None:
    assert list(by_tier(LowerTiers(host=1, shared=3)).items()) == [("host", 1), ("disk", 0), ("shared", 3)]
