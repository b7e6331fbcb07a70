"""Chooses the implementation of the engine model: Rust if it is built, otherwise Python.

Both give equal outputs, events and times. ``KVROUTER_ENGINE`` selects one: ``native`` (importing fails if it is not
built), ``reference``, or ``auto``, the default.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Protocol

from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.mocker.engine.offloading import Parts
from kvrouter.mocker.engine.reference import Engine
from kvrouter.mocker.engine.types import CachedBlock, EngineRequest, Load, Output, Step


class EngineModel(Protocol):
    """The interface of an engine model. ``kvrouter.mocker.engine.reference`` documents each method."""

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
        raise ValueError(f"KVROUTER_ENGINE: expected native, reference or auto, received {requested!r}")
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


def make_engines(configs: Iterable[EngineConfig]) -> list[EngineModel]:
    """Returns engines of the chosen implementation, with one shared storage."""
    if IMPLEMENTATION == "native":
        from kvrouter.mocker.engine._native import SharedStorage
        from kvrouter.mocker.engine.native import NativeEngine

        storage = SharedStorage()
        return [NativeEngine(config, storage) for config in configs]
    parts: Parts = []
    return [Engine(config, parts) for config in configs]
