"""Memory of the native index: what it takes, what it says that it takes, and that all of it comes back."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from ..batches import batch, cleared, removed, stored
from ..conftest import implementation

CHAIN = 256


@pytest.fixture(scope="module")
def native() -> type:
    return implementation("native", "PrefixIndex").PrefixIndex


class Fleet:
    """Workers whose caches come and go; events are numbered, and what each worker holds is known."""

    def __init__(self, index: Any, seed: int = 1) -> None:
        self.index = index
        self.draw = random.Random(seed)
        self.cursors: dict[int, int] = {}
        self.incarnations: dict[int, int] = {}
        self.chains: dict[int, deque[list[int]]] = {}
        self.shared = [self.hashes(CHAIN) for _ in range(4)]

    def hashes(self, count: int) -> list[int]:
        return [self.draw.getrandbits(64) for _ in range(count)]

    def send(self, worker: int, *events: Any) -> Any:
        first = self.cursors.get(worker, 0)
        self.cursors[worker] = first + len(events)
        incarnation = self.incarnations.get(worker, 1)
        return self.index.apply(batch(first, *events, rank=(worker, 0), incarnation=incarnation))

    def store(self, worker: int) -> None:
        """A conversation: below a prompt that others have too, by the same names or by names of its own."""
        prompt, rest = self.draw.choice(self.shared), self.hashes(self.draw.randrange(1, CHAIN))
        engine = self.hashes(CHAIN) if worker % 4 == 0 else prompt
        self.send(worker, stored(engine, prompt), stored(rest, rest, parent=engine[-1]))
        self.chains.setdefault(worker, deque()).append(engine + rest)

    def evict(self, worker: int) -> None:
        """The oldest conversation goes: leaf first, or in any order."""
        gone = self.chains[worker].popleft()
        order = gone[::-1] if self.draw.random() < 0.7 else self.draw.sample(gone, len(gone))
        for start in range(0, len(order), 60):
            self.send(worker, removed(*order[start : start + 60]))

    def restart(self, worker: int) -> None:
        """Another life of the worker, or its cache reset, or its departure."""
        way = self.draw.randrange(3)
        if way == 0:
            self.send(worker, cleared())
        elif way == 1:
            self.incarnations[worker] = self.incarnations.get(worker, 1) + 1
            self.cursors[worker] = 0
        else:
            self.index.remove_rank((worker, 0))
            self.cursors[worker] = 0
        self.chains[worker] = deque()

    def leave(self) -> None:
        for worker in self.cursors:
            self.index.remove_rank((worker, 0))


def test_a_day_of_churn_ends_where_it_began(native: type) -> None:
    """A day in short: every cache is turned over thirty times, and some workers die. Then all is as after the start."""
    index = native()
    fleet = Fleet(index)
    for _ in range(10):
        for worker in range(8):
            fleet.store(worker)
    begun, turned = index.stats(), []
    for round_ in range(300):
        for worker in range(8):
            fleet.store(worker)
            while len(fleet.chains[worker]) > 10:
                fleet.evict(worker)
        if round_ % 50 == 25:
            fleet.restart(fleet.draw.randrange(8))
        if round_ % 50 == 49:
            turned.append(index.stats().memory_bytes / index.stats().blocks)
    assert max(turned) < 1.5 * begun.memory_bytes / begun.blocks
    assert turned[-1] < 1.2 * turned[0]
    fleet.leave()
    assert index.stats().memory_bytes < 1 << 20
    assert index.stats()[:3] == (0, 0, 0)


def test_what_ranks_take_adds_up_and_is_free_without_them(native: type) -> None:
    index = native()
    fleet = Fleet(index)
    for worker in range(1, 5):
        for _ in range(100 * worker):
            chain = fleet.hashes(CHAIN)
            fleet.send(worker, stored(chain, chain))
    infos, stats = index.ranks(), index.stats()
    assert [info.blocks for info in infos] == [100 * CHAIN * worker for worker in range(1, 5)]
    taken = [info.memory_bytes for info in infos]
    assert 0.95 * stats.memory_bytes < sum(taken) <= stats.memory_bytes
    index.remove_rank((4, 0))
    freed = stats.memory_bytes - index.stats().memory_bytes
    assert 0.5 * taken[3] < freed < 1.2 * taken[3]


RESIDENT = """
import gc, sys
sys.path.insert(0, {bench!r})
from engines import Kvrouter, hashes, resident

engine = Kvrouter()
def store(worker, blocks):
    for start in range(0, blocks, 512):
        engine.apply(*engine.stored(worker, None, hashes(512), hashes(512)))

store(99, 1 << 12)
engine.leave(99)
gc.collect()
empty = resident()
for worker in range(16):
    store(worker, 1 << 16)
full, accounted = resident() - empty, engine.bytes()
for worker in range(1, 16):
    engine.leave(worker)
few = resident() - empty
engine.leave(0)
print(full, accounted, few, resident() - empty)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_memory_goes_back_to_the_system_when_most_workers_leave(native: type) -> None:
    """In a process of its own, where nothing else comes and goes."""
    code = RESIDENT.format(bench=str(Path(__file__).parents[4] / "bench/core"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    full, accounted, few, none = map(int, done.stdout.split())
    assert abs(full - accounted) < full // 10, "what it says is what it takes"
    assert full < 40 * (1 << 20)
    assert few < full // 16 + full // 8
    assert none < full // 10
