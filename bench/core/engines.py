"""The two indexes that are measured, each called as a program would call it, and shared helpers."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import encode

RANDOM = np.random.default_rng(1)
Measurements = dict[str, float]

now: Callable[[], int] = time.process_time_ns if "--cpu" in sys.argv else time.perf_counter_ns
"""Returns nanoseconds of the wall clock; of processor time with --cpu."""


def hashes(count: int) -> encode.Hashes:
    return RANDOM.integers(1, 1 << 63, count, dtype=np.uint64)


def resident() -> int:
    """Returns the resident memory of this process, bytes."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGESIZE")


def each(call: Callable[[], Any], rounds: int) -> float:
    """Returns the nanoseconds of one call."""
    start = now()
    for _ in range(rounds):
        call()
    return (now() - start) / rounds


def at(values: list[int], share: float) -> float:
    """Returns the quantile of sorted values at a share."""
    return float(values[min(len(values) - 1, int(len(values) * share))])


class Kvrouter:
    """kvrouter's index, called as a service calls it."""

    def __init__(self) -> None:
        from kvrouter.core._native import PrefixIndex

        self.index = PrefixIndex()
        self.ids: dict[int, int] = {}
        self.incarnations: dict[int, int] = {}
        self.apply = self.index.apply
        self.find = self.index.overlaps

    def _next(self, worker: int) -> tuple[int, int, int]:
        event_id = self.ids.get(worker, 0)
        self.ids[worker] = event_id + 1
        return worker, self.incarnations.get(worker, 1), event_id

    def stored(self, worker: int, parent: int | None, engine: encode.Hashes, local: encode.Hashes) -> tuple[Any, ...]:
        return (encode.stored(*self._next(worker), parent, engine, local),)

    def removed(self, worker: int, engine: encode.Hashes) -> tuple[Any, ...]:
        return (encode.removed(*self._next(worker), engine),)

    def prompt(self, local: encode.Hashes) -> Any:
        return local.tobytes()

    def leave(self, worker: int) -> None:
        self.index.remove_rank((worker, 0))
        self.ids.pop(worker, None)

    def begin_again(self, worker: int) -> None:
        """Begins a new incarnation with the worker's next event."""
        self.incarnations[worker] = self.incarnations.get(worker, 1) + 1
        self.ids[worker] = 0

    def forget(self) -> None:
        for info in self.index.ranks():
            self.leave(info.worker_id)

    def bytes(self) -> int:
        return int(self.index.stats().memory_bytes)


class Dynamo:
    """Dynamo's tree, through its Python binding."""

    def __init__(self) -> None:
        from dynamo.llm import RadixTree

        self.tree = RadixTree()
        self.apply = self.tree.apply_event
        self.event_id = 0

    def find(self, prompt: list[int]) -> Any:
        return self.tree.find_matches(prompt).scores

    def _event(self, worker: int, data: dict[str, Any]) -> tuple[Any, ...]:
        import orjson

        self.event_id += 1
        return worker, orjson.dumps({"event_id": self.event_id, "data": data, "dp_rank": 0})

    def stored(self, worker: int, parent: int | None, engine: encode.Hashes, local: encode.Hashes) -> tuple[Any, ...]:
        pairs = zip(engine.tolist(), local.tolist(), strict=True)
        blocks = [{"block_hash": block, "tokens_hash": tokens} for block, tokens in pairs]
        return self._event(worker, {"stored": {"parent_hash": parent, "blocks": blocks}})

    def removed(self, worker: int, engine: encode.Hashes) -> tuple[Any, ...]:
        return self._event(worker, {"removed": {"block_hashes": engine.tolist()}})

    def prompt(self, local: encode.Hashes) -> Any:
        return local.tolist()


Engine = Kvrouter | Dynamo


def engine_of(name: str) -> Engine:
    return Kvrouter() if name == "kvrouter" else Dynamo()
