"""Policies by name: the built-in ones, and those of other installed packages.

A package adds a policy with an entry point of the group ``kvrouter.policies``: the name of the mode, and the class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import NamedTuple

from kvrouter.scheduler.policies import cache_aware, load_only
from kvrouter.scheduler.policies.forecast.policy import ForecastPolicy
from kvrouter.scheduler.policies.interface import Policy

GROUP = "kvrouter.policies"
_MEMBERS = ("decide", "uses_overlap", "needs_worker", "token_ms", "options")

_BUILT_IN: Mapping[str, Policy] = {
    policy.name: policy
    for policy in (
        load_only.DirectPolicy(),
        ForecastPolicy(),
        cache_aware.KvPolicy(),
        load_only.PowerOfTwoPolicy(),
        cache_aware.ProductPolicy(),
        load_only.RandomPolicy(),
        load_only.RoundRobinPolicy(),
        cache_aware.StickyPolicy(),
    )
}


class Installed(NamedTuple):
    """The policies of other packages."""

    policies: Mapping[str, Policy]
    """Policy by mode name, sorted by name."""
    refused: Mapping[str, str]
    """Why an entry point gives no policy, by its name."""


def installed_policies(points: Iterable[EntryPoint]) -> Installed:
    """Returns the policies of entry points. One that cannot be used does not keep the others from working."""
    policies: dict[str, Policy] = {}
    refused: dict[str, str] = {}
    for point in sorted(points, key=lambda each: each.name):
        try:
            policies[point.name] = _loaded(point, policies)
        except Exception as error:  # whatever a package does when it is imported
            refused[point.name] = f"{type(error).__name__}: {error}"[:500]
    return Installed(policies, refused)


def _loaded(point: EntryPoint, known: Mapping[str, Policy]) -> Policy:
    if point.name in known or point.name in _BUILT_IN:
        raise ValueError(f"expected a new name, but a policy {point.name!r} exists: rename the policy")
    policy: Policy = point.load()()
    if policy.name != point.name:
        raise ValueError(f"expected the name {point.name!r} of its entry point, received {policy.name!r}")
    missing = [name for name in _MEMBERS if not hasattr(policy, name)]
    if missing:
        raise TypeError(f"expected a subclass of Policy, received {type(policy).__name__} without {', '.join(missing)}")
    return policy


INSTALLED = installed_policies(entry_points(group=GROUP))
POLICIES: Mapping[str, Policy] = MappingProxyType(dict(sorted({**_BUILT_IN, **INSTALLED.policies}.items())))
"""Policy by mode name, sorted by name."""
