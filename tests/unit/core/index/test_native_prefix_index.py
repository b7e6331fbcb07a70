"""What only the native index has to prove: long runs, tables that grow, memory that comes back, threads."""

from __future__ import annotations

import random
import struct
import threading
from typing import Any

import pytest
from kvrouter.core import EventBatch, reference
from kvrouter.v1.events_pb2 import KvEvent

from ..batches import COUNTED, SET, batch, cleared, device_overlap, packed, removed, said, stored
from ..conftest import implementation
from .histories import Reload, Remove, perform


@pytest.fixture(scope="module")
def native() -> type:
    return implementation("native", "PrefixIndex").PrefixIndex


class LongChains:
    """Random events with chains of many chunks, by a seed. Blocks are few enough that chains meet, fork and move."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.engine = [self.draw.getrandbits(64) for _ in range(self.draw.choice([40, 200]))]
        self.private = self.draw.choice([0.0, 0.3, 1.0])
        self.cursors: dict[int, int] = {}

    def event(self) -> KvEvent:
        draw, engine = self.draw, self.engine
        length, first = draw.randrange(1, 60), draw.randrange(len(engine))
        tier = draw.choice([1] * 8 + [2, 3, 4])
        around = [engine[(first + offset) % len(engine)] for offset in range(min(length, len(engine)))]
        kind = draw.random()
        if kind < 0.5:
            local = [draw.choice([5, 5, 5, 5, 5, 5, 5, 6]) for _ in around]
            own = draw.sample(engine, len(around)) if draw.random() < self.private else around
            parent = draw.choice(engine) if draw.random() < 0.6 else None
            return stored([one for one in own if one != parent], local[: len(own) - (parent in own)], parent, tier)
        if kind < 0.97:
            gone = draw.choice([around, around[::-1], draw.sample(around, len(around)), around[::2]])
            return removed(*gone, tier=tier)
        return cleared(draw.choice([0, 1, 2]))

    def batch(self) -> bytes:
        worker = self.draw.randrange(3)
        events = [self.event() for _ in range(self.draw.randrange(1, 4))]
        first = self.cursors.get(worker, 0)
        self.cursors[worker] = first + len(events)
        return batch(first, *events, rank=(worker, 0), counting=[COUNTED, SET, COUNTED][worker])

    def prompt(self) -> bytes:
        return packed(self.draw.choice([5, 5, 5, 5, 5, 5, 5, 5, 5, 6]) for _ in range(self.draw.randrange(150)))


@pytest.mark.parametrize("seed", range(12))
def test_long_chains_agree_with_the_reference(native: type, seed: int) -> None:
    index, oracle, chains = native(), reference.PrefixIndex(), LongChains(seed)
    for step in range(150):
        data = chains.batch()
        assert said(index.apply(data)) == said(oracle.apply(data))
        if step % 10 == 0:
            reload = Reload((chains.draw.randrange(3), 0), 7, None)
            assert perform(index, reload) == perform(oracle, reload)
        prompt = chains.prompt()
        assert index.find_matches(prompt) == oracle.find_matches(prompt)
    for worker in range(3):
        assert index.digest((worker, 0)) == oracle.digest((worker, 0))
        assert perform(index, Remove((worker, 0))) == perform(oracle, Remove((worker, 0)))
    assert index.stats()[:3] == (0, 0, 0)


def fill(index: Any, worker: int, blocks: int, first_id: int = 0, of: int = 512) -> int:
    """Stores chains of random blocks. Returns the next event id."""
    draw = random.Random(worker * 1_000_003 + first_id)
    for start in range(0, blocks, of):
        hashes = draw.randbytes(16 * of)
        engine, local = (struct.unpack(f"<{of}Q", hashes[half::2][: 8 * of]) for half in (0, 1))
        index.apply(batch(first_id + start // of, stored(engine, local), rank=(worker, 0)))
    return first_id + blocks // of


def test_growth_moves_little_at_a_time_and_blocks_are_small(native: type) -> None:
    index = native()
    fill(index, 1, 1 << 18)
    assert 0 < index.most_moved() <= 4096
    assert index.stats().memory_bytes < 40 * index.stats().blocks


def test_memory_comes_back_when_workers_leave_and_after_churn(native: type) -> None:
    index = native()
    fill(index, 0, 1 << 14)
    before = index.stats().memory_bytes
    for churn in range(3):
        for worker in range(1, 5):
            fill(index, worker, 1 << 16)
        full = index.stats().memory_bytes
        assert full > 4 * before
        for worker in range(1, 5):
            assert index.remove_rank((worker, 0)) == 1 << 16
        assert index.stats().memory_bytes < before + full // 8, churn
    index.remove_rank((0, 0))
    assert index.stats().memory_bytes < 1 << 20


def test_engine_hashes_that_are_only_counters(native: type) -> None:
    """Engines may number their blocks: the same engine hash is then at another place on every worker."""
    index = native()
    for worker in range(200):
        engine = list(range(1, 41))
        local = [worker * 1000 + block for block in range(40)]
        index.apply(batch(0, stored(engine, local), rank=(worker, 0)))
    for worker in range(0, 200, 7):
        assert device_overlap(index, *[worker * 1000 + block for block in range(40)], rank=(worker, 0)) == 40
        index.apply(batch(1, removed(20), stored([50], [9], parent=19), rank=(worker, 0)))
        assert device_overlap(index, *[worker * 1000 + block for block in range(40)], rank=(worker, 0)) == 19
    for worker in range(200):
        assert index.remove_rank((worker, 0)) == 40


def test_one_engine_hash_that_moves_and_moves(native: type) -> None:
    index = native()
    index.apply(batch(0, stored([7, 8], [0, 0])))
    for place in range(1, 2000):
        index.apply(batch(place, stored([7, 100 + place], [place, 0])))
    assert device_overlap(index, 1999, 0) == 2
    assert device_overlap(index, 1998, 0) == 0
    assert index.stats().blocks == 2001


def test_queries_are_right_while_batches_are_applied(native: type) -> None:
    index = native()
    kept = list(range(1, 701))
    index.apply(batch(0, stored(kept, kept), rank=(1, 0)))
    prompt = packed(kept)
    stop = threading.Event()
    failures: list[str] = []

    def ask() -> None:
        while not stop.is_set():
            first, *_ = struct.unpack_from("<I", index.overlaps(prompt))
            if first != 700:
                failures.append(f"overlap {first}")

    askers = [threading.Thread(target=ask) for _ in range(2)]
    for asker in askers:
        asker.start()
    branch = kept[:350] + [9_000_000 + block for block in range(4000)]
    event_id = 0
    for _ in range(40):
        index.apply(batch(event_id, stored(branch, branch), rank=(2, 0)))
        index.apply(batch(event_id + 1, removed(*branch[::-1]), rank=(2, 0)))
        event_id += 2
    stop.set()
    for asker in askers:
        asker.join()
    assert not failures
    assert index.stats().blocks == 700


def test_a_digest_that_events_change_takes_its_time(native: type) -> None:
    index, many = native(check_digests=True), 20_000
    index.apply(batch(0, stored(range(1, many), range(1, many)), digest=0))
    with_event = EventBatch(batch(1, removed(1), digest=0))
    assert index.apply_ns(with_event) > 10 * many
    assert index.apply_ns(EventBatch(batch(1, removed(1)))) < many
