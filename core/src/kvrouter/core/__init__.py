"""The core: hashing, prefix index and active sequences, the library for work per block.

The environment variable ``KVROUTER_CORE`` selects the implementation: ``native`` is Rust, and the import fails unless
all of it is built; ``reference`` is plain Python; ``auto``, the default, takes the Rust one of each name if it is built
and otherwise the Python one. Services warn if they start with the reference and ``KVROUTER_CORE`` does not select it.
"""

# Type checkers read a literal ``__all__`` only, so it lists names of the star import too.
# ruff: noqa: F405

from __future__ import annotations

import importlib
import os
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvrouter.core import reference
from kvrouter.core.interface import (
    ApplySummary,
    CachedRank,
    Call,
    IndexStats,
    InvalidDump,
    NotATokenId,
    Rank,
    RankInfo,
    RefusedBatch,
    Scope,
    Speed,
    TokenBuffer,
    call_of,
)
from kvrouter.core.multimodal import multimodal_hash


def _choose(requested: str) -> dict[str, tuple[str, Any]]:
    """Returns name → (implementation, object).

    Raises:
        ImportError: the native core is requested and is not built, or lacks a name.
        ValueError: ``requested`` is not ``native``, ``reference`` or ``auto``.
    """
    if requested not in ("auto", "native", "reference"):
        raise ValueError(f"expected KVROUTER_CORE to be native, reference or auto, received {requested!r}")
    native: Any = None
    if requested != "reference":
        try:
            # It has no stub: type checkers see the reference.
            native = importlib.import_module("kvrouter.core._native")
        except ImportError:
            if requested == "native":
                raise
    chosen: dict[str, tuple[str, Any]] = {}
    for name in reference.__all__:
        if hasattr(native, name):
            chosen[name] = ("native", getattr(native, name))
        elif requested == "native":
            raise ImportError(
                f"KVROUTER_CORE is native, but the native core has no {name}: build it, or set KVROUTER_CORE=auto"
            )
        else:
            chosen[name] = ("reference", getattr(reference, name))
    return chosen


REQUESTED = os.environ.get("KVROUTER_CORE") or "auto"
"""The requested implementation: "native", "reference" or "auto"."""

_chosen = _choose(REQUESTED)

IMPLEMENTATIONS = MappingProxyType({name: implementation for name, (implementation, _) in _chosen.items()})
"""Name → "native" or "reference"."""

IMPLEMENTATION = "native" if all(one == "native" for one in IMPLEMENTATIONS.values()) else "reference"
""""native" if all of the core is native, else "reference"."""

MISSING_NATIVE = (
    "the Rust core is not built: the slower Python core is used. Build it with a Rust toolchain, or set "
    "KVROUTER_CORE=reference"
)
"""What services say that start with the reference without being told to."""

FORECAST_MODEL: Any = None
"""The class ``interface.ForecastModel`` of the native core; None without the native core."""
if IMPLEMENTATION == "native":
    FORECAST_MODEL = importlib.import_module("kvrouter.core._native").ForecastModel

if TYPE_CHECKING:
    # Type checkers see the reference. Tests check that the native core has the same interface.
    from kvrouter.core.reference import *  # noqa: F403
else:
    globals().update((name, chosen) for name, (_, chosen) in _chosen.items())

__all__ = [
    "FORECAST_MODEL",
    "IMPLEMENTATION",
    "IMPLEMENTATIONS",
    "MISSING_NATIVE",
    "REQUESTED",
    "ActiveSequences",
    "ApplySummary",
    "CacheRecency",
    "CachedRank",
    "Call",
    "ChunkWriter",
    "EventBatch",
    "EventRecorder",
    "IndexStats",
    "InvalidDump",
    "LatencyCalibration",
    "MeasuredFactor",
    "MemoryBudget",
    "NotATokenId",
    "Observations",
    "OutputWriter",
    "PassedStream",
    "PredictedIndex",
    "PrefixIndex",
    "Rank",
    "RankInfo",
    "RefusedBatch",
    "Scope",
    "Speed",
    "TokenBuffer",
    "TokenWriter",
    "call_of",
    "find_json_value",
    "first_token_outside",
    "json_flaw",
    "local_hashes",
    "multimodal_hash",
    "pass_pieces",
    "read_calls",
    "read_matches",
    "read_messages",
    "read_nats_messages",
    "read_output",
    "read_responses",
    "sequence_hashes",
    "split_json",
    "tokens_from_json",
    "tokens_to_json",
    "write_calls",
    "write_responses",
]
