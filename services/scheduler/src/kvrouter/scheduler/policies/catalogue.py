"""Policies by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvrouter.scheduler.policies import cache_aware, load_only
from kvrouter.scheduler.policies.forecast.policy import ForecastPolicy
from kvrouter.scheduler.policies.interface import Policy

_ALL: tuple[Policy, ...] = (
    load_only.DirectPolicy(),
    ForecastPolicy(),
    cache_aware.KvPolicy(),
    load_only.PowerOfTwoPolicy(),
    cache_aware.ProductPolicy(),
    load_only.RandomPolicy(),
    load_only.RoundRobinPolicy(),
    cache_aware.StickyPolicy(),
)
POLICIES: Mapping[str, Policy] = MappingProxyType({policy.name: policy for policy in _ALL})
"""Policy by mode name, sorted by name."""
