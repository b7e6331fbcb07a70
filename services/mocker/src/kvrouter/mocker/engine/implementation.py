"""Which implementation of the engine model runs: the one in Rust where it is built, else the plain Python one.

Both give the same outputs, events and times. ``KVROUTER_ENGINE`` chooses: ``native`` (importing fails unless it is
built), ``reference``, or ``auto``, the default.
"""

from __future__ import annotations

import os
from typing import Protocol

from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.mocker.engine.reference import Engine
from kvrouter.mocker.engine.types import CachedBlock, EngineRequest, Load, Output, Step


class EngineModel(Protocol):
    """What a driver steps; ``kvrouter.mocker.engine.reference`` says what each method does."""

    config: EngineConfig

    def check(self, request: EngineRequest, waiting: int = 0) -> None: ...  # noqa: D102
    def submit(self, request: EngineRequest, now: float) -> None: ...  # noqa: D102
    def begin_step(self, now: float) -> Step | None: ...  # noqa: D102
    def end_step(self, now: float) -> list[Output]: ...  # noqa: D102
    def abort(self, request_id: str) -> Output | None: ...  # noqa: D102
    def clear_cache(self) -> None: ...  # noqa: D102
    def load(self) -> Load: ...  # noqa: D102
    def cached_blocks(self) -> dict[int, CachedBlock]: ...  # noqa: D102


def _choose(requested: str) -> str:
    if requested not in ("auto", "native", "reference"):
        raise ValueError(f"KVROUTER_ENGINE is {requested!r}: use native, reference or auto")
    if requested == "reference":
        return requested
    try:
        from kvrouter.mocker.engine import native as native_engine  # noqa: F401
    except ImportError:
        if requested == "native":
            raise
        return "reference"
    return "native"


IMPLEMENTATION = _choose(os.environ.get("KVROUTER_ENGINE") or "auto")
""""native" or "reference"."""


def make_engine(config: EngineConfig) -> EngineModel:
    """An engine of the chosen implementation."""
    if IMPLEMENTATION == "native":
        from kvrouter.mocker.engine.native import NativeEngine

        return NativeEngine(config)
    return Engine(config)
