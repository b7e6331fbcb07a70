"""Policies by name. Each folder of this package has a module ``policy`` with a class ``Rule``."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType

from kvrouter.scheduler import policies
from kvrouter.scheduler.policies.interface import Policy


def _found() -> dict[str, Policy]:
    modules = [
        importlib.import_module(f"{policies.__name__}.{info.name}.policy")
        for info in pkgutil.iter_modules(policies.__path__)
        if info.ispkg
    ]
    rules: list[Policy] = [module.Rule() for module in modules]
    return {rule.name: rule for rule in sorted(rules, key=lambda rule: rule.name)}


POLICIES: Mapping[str, Policy] = MappingProxyType(_found())
"""Policy by mode name, sorted by name."""
