"""Hashing, prefix index and active sequences: what is done per block.

``KVROUTER_CORE`` chooses the implementation: ``native`` (Rust; importing fails unless all of it is built),
``reference`` (plain Python), or ``auto``, the default: name by name, the Rust one where it is built. Services start on
the reference only if it is named.
"""

from __future__ import annotations

import os
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvrouter.core.interface import (
    ApplySummary,
    BookingRequest,
    IndexStats,
    InvalidDump,
    LoadColumns,
    Rank,
    RankInfo,
    RefusedBatch,
    Scope,
    TokenBuffer,
)

_NAMES = (
    "local_hashes",
    "sequence_hashes",
    "EventBatch",
    "MemoryBudget",
    "PrefixIndex",
    "PredictedIndex",
    "ActiveSequences",
)


def _choose(requested: str) -> dict[str, tuple[str, Any]]:
    """Name → (implementation, object).

    Raises:
        ImportError: the native core is requested, and lacks a name.
        ValueError: there is no such implementation.
    """
    from kvrouter.core import reference

    if requested not in ("auto", "native", "reference"):
        raise ValueError(f"KVROUTER_CORE is {requested!r}: use native, reference or auto")
    native: Any = None
    if requested != "reference":
        try:
            from kvrouter.core import _native as native
        except ImportError:
            if requested == "native":
                raise
    chosen: dict[str, tuple[str, Any]] = {}
    for name in _NAMES:
        if hasattr(native, name):
            chosen[name] = ("native", getattr(native, name))
        elif requested == "native":
            raise ImportError(f"KVROUTER_CORE is native, and the native core has no {name}: build it, or use auto")
        else:
            chosen[name] = ("reference", getattr(reference, name))
    return chosen


REQUESTED = os.environ.get("KVROUTER_CORE") or "auto"
"""What was requested: "native", "reference" or "auto"."""

_chosen = _choose(REQUESTED)

IMPLEMENTATIONS = MappingProxyType({name: implementation for name, (implementation, _) in _chosen.items()})
"""Name → "native" or "reference"."""

IMPLEMENTATION = "native" if all(one == "native" for one in IMPLEMENTATIONS.values()) else "reference"
""""native" if all of the core is native, else "reference"."""

if TYPE_CHECKING:
    # Type checkers see the reference, to whose interface the native core is held.
    from kvrouter.core.reference import (
        ActiveSequences,
        EventBatch,
        MemoryBudget,
        PredictedIndex,
        PrefixIndex,
        local_hashes,
        sequence_hashes,
    )
else:
    local_hashes, sequence_hashes, EventBatch, MemoryBudget, PrefixIndex, PredictedIndex, ActiveSequences = (
        _chosen[name][1] for name in _NAMES
    )

__all__ = [
    "IMPLEMENTATION",
    "IMPLEMENTATIONS",
    "REQUESTED",
    "ActiveSequences",
    "ApplySummary",
    "BookingRequest",
    "EventBatch",
    "IndexStats",
    "InvalidDump",
    "LoadColumns",
    "MemoryBudget",
    "PredictedIndex",
    "PrefixIndex",
    "Rank",
    "RankInfo",
    "RefusedBatch",
    "Scope",
    "TokenBuffer",
    "local_hashes",
    "sequence_hashes",
]
