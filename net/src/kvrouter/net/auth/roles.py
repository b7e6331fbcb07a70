"""Roles permitted to call each method of the internal services.

FrontendService is for clients, which authenticate with keys of the API; health and reflection are open to everybody.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

ADMIN = "admin"
"""Role with permission for every method."""

_FRONTEND = frozenset({"frontend"})

SERVICE_ROLES: Mapping[str, Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "kvrouter.v1.SchedulerService": {
            "SelectWorker": _FRONTEND,
            "MarkPrefillComplete": _FRONTEND,
            "ReportOutput": _FRONTEND,
            "Free": _FRONTEND,
            "OpenSession": _FRONTEND,
            "UpdateBookings": _FRONTEND,
            "CloseSession": _FRONTEND,
            "GetPotentialLoads": _FRONTEND,
            # Administrators set thresholds at a Frontend as well.
            "SetBusyThreshold": _FRONTEND,
            "ListBusyThresholds": _FRONTEND,
            # For the web page.
            "Explain": _FRONTEND,
            "GetStatus": _FRONTEND,
        },
        "kvrouter.v1.IndexerService": {
            "FindMatches": frozenset({"frontend", "scheduler"}),
            "Dump": _FRONTEND,
            "GetStats": _FRONTEND,
        },
        "kvrouter.v1.WorkerService": {
            "Generate": _FRONTEND,
            "Abort": _FRONTEND,
            # Frontends and Schedulers with listed workers ask these what they serve.
            "GetLoad": frozenset({"frontend", "scheduler"}),
            "GetModelFile": _FRONTEND,
            "GetRankState": frozenset({"indexer"}),
            "GetEvents": frozenset({"indexer"}),
        },
    }
)
"""Roles by service and method. A method not listed is for administrators only."""

_NOBODY: frozenset[str] = frozenset()


def is_checked(method: str) -> bool:
    """Returns whether a method, such as ``kvrouter.v1.WorkerService/Abort``, is one the table decides about."""
    return method.partition("/")[0] in SERVICE_ROLES


def may_call(roles: Collection[str], method: str) -> bool:
    """Returns whether a process with these roles may call a method."""
    service, _, name = method.partition("/")
    methods = SERVICE_ROLES.get(service)
    if methods is None or ADMIN in roles:
        return True
    return not methods.get(name, _NOBODY).isdisjoint(roles)
