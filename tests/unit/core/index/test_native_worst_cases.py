"""Worst cases of the native index, each with its bound in bytes or in entries moved, and with right answers.

What they cost in time `bench/core` measures.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from ..batches import SET, batch, device_overlap, matches, removed, stored
from ..conftest import implementation

MOST_MOVED = 4096
FIXED = 4 << 20
"""Bytes that an index takes beside its blocks: the smallest tables, and buffers for the largest event."""


@pytest.fixture
def index() -> Iterator[Any]:
    """An index that must end empty once its ranks leave, and must never have moved many entries at once."""
    index = implementation("native", "PrefixIndex").PrefixIndex()
    yield index
    for info in index.ranks():
        index.remove_rank(info[:2])
    assert index.stats()[:3] == (0, 0, 0)
    assert index.stats().memory_bytes < FIXED
    assert index.most_moved() <= MOST_MOVED


def hashes(count: int, seed: int = 1) -> list[int]:
    draw = random.Random(seed)
    return [draw.getrandbits(64) for _ in range(count)]


def bytes_per_block(index: Any) -> float:
    stats = index.stats()
    return max(0.0, float((stats.memory_bytes - FIXED) / stats.blocks))


def test_200_000_one_block_siblings(index: Any) -> None:
    siblings = hashes(200_000)
    for number in range(200):
        events = (stored([one], [one]) for one in siblings[number * 1000 : (number + 1) * 1000])
        assert index.apply(batch(number * 1000, *events)).stored_blocks == 1000
    assert bytes_per_block(index) < 400
    assert all(device_overlap(index, one) == 1 for one in siblings[::20_000])
    for number in range(4):
        gone = siblings[1 + number * 50_000 : (number + 1) * 50_000 : 2]
        assert index.apply(batch(200_000 + number, removed(*gone))).removed_blocks == 25_000
    assert [device_overlap(index, one) for one in siblings[:4]] == [1, 0, 1, 0]


def test_siblings_below_one_block(index: Any) -> None:
    siblings = hashes(20_000)
    index.apply(batch(0, stored([1], [1])))
    index.apply(batch(1, *(stored([one], [one], parent=1) for one in siblings)))
    assert bytes_per_block(index) < 400
    assert device_overlap(index, 1, siblings[-1]) == 2


def test_every_second_block_removed(index: Any) -> None:
    chains = [hashes(512, seed) for seed in range(200)]
    index.apply(batch(0, *(stored(chain, chain) for chain in chains)))
    before = index.stats().memory_bytes
    for number, chain in enumerate(chains):
        assert index.apply(batch(200 + number, removed(*chain[1::2]))).removed_blocks == 256
    assert index.stats().memory_bytes - before < 3 * 200 * 512
    assert device_overlap(index, *chains[7]) == 1
    index.apply(batch(400, *(stored(chain, chain) for chain in chains), counting=SET))
    assert device_overlap(index, *chains[7]) == 512


def test_removal_in_random_order(index: Any) -> None:
    chains = [hashes(512, seed) for seed in range(200)]
    index.apply(batch(0, *(stored(chain, chain) for chain in chains)))
    before = index.stats().memory_bytes
    order = [one for chain in chains for one in chain]
    random.Random(1).shuffle(order)
    for number, start in enumerate(range(0, len(order), 64)):
        assert index.apply(batch(200 + number, removed(*order[start : start + 64]))).removed_blocks == 64
        assert index.stats().memory_bytes < before + 3 * len(order)
    assert index.stats().blocks == 0


def test_one_engine_hash_at_100_000_places(index: Any) -> None:
    """Of one worker: the hash moves; the last place holds."""
    places = hashes(100_000)
    for start in range(0, 100_000, 1000):
        assert index.apply(batch(start, *(stored([7], [one]) for one in places[start : start + 1000]))).applied == 1000
    assert index.stats().blocks == 1
    assert (device_overlap(index, places[-1]), device_overlap(index, places[0])) == (1, 0)
    assert index.stats().memory_bytes < FIXED


def test_one_engine_hash_on_thousands_of_workers(index: Any) -> None:
    """Of every worker another place: a chain of equal keys would make each lookup a walk over all of them."""
    places = hashes(4000)
    for worker, one in enumerate(places):
        index.apply(batch(0, stored([7], [one]), rank=(worker, 0)))
    assert matches(index, [places[17]])[17, 0][0] == 1
    for worker in range(0, 4000, 3):
        assert index.apply(batch(1, removed(7), rank=(worker, 0))).removed_blocks == 1
    assert index.stats().memory_bytes < FIXED + 2048 * 4000


def test_a_prompt_of_65_536_blocks(index: Any) -> None:
    prompt = hashes(65_536)
    assert index.apply(batch(0, stored(prompt, prompt))).stored_blocks == 65_536
    assert bytes_per_block(index) < 36
    assert device_overlap(index, *prompt) == 65_536
    branch = hashes(64, 2)
    index.apply(batch(1, stored(branch, branch, parent=prompt[40_000])))
    assert device_overlap(index, *prompt[:40_001], *branch) == 40_065
    index.apply(batch(2, removed(prompt[30_000])))
    assert device_overlap(index, *prompt) == 30_000
    index.apply(batch(3, removed(*(one for one in prompt[::-1] if one != prompt[30_000]))))
    assert index.stats().blocks == 64


def test_2_048_workers_on_one_prefix(index: Any) -> None:
    prompt, workers = hashes(512), 2048
    for worker in range(workers):
        index.apply(batch(0, stored(prompt[: 1 + worker % 512], prompt[: 1 + worker % 512]), rank=(worker, 0)))
    overlaps = matches(index, prompt)
    assert all(overlaps[worker, 0][0] == 1 + worker % 512 for worker in range(workers))
    assert index.stats().distinct_blocks == 512
    assert index.stats().memory_bytes < FIXED + 300 * workers
    for worker in range(0, workers, 2):
        index.remove_rank((worker, 0))
    assert len(matches(index, prompt)) == workers // 2


def test_a_prefix_under_two_engine_hashes_of_one_worker(index: Any) -> None:
    prompt, first, second = hashes(4096), hashes(4096, 2), hashes(4096, 3)
    index.apply(batch(0, stored(first, prompt)))
    alone = index.stats().memory_bytes
    index.apply(batch(1, stored(second, prompt)))
    assert (index.stats().blocks, index.stats().distinct_blocks) == (8192, 4096)
    assert index.stats().memory_bytes - alone < 40 * 4096
    index.apply(batch(2, removed(*first)))
    assert device_overlap(index, *prompt) == 4096
    index.apply(batch(3, removed(*second[100:])))
    assert device_overlap(index, *prompt) == 100


def test_long_chains_whose_blocks_need_a_look_each(index: Any) -> None:
    """Time for each block that grows with its chain would make this run for minutes."""
    names, prompts = hashes(65_536), [hashes(65_536, seed) for seed in range(10, 14)]
    index.apply(batch(0, stored(names, prompts[0])))
    index.apply(batch(0, stored(names, prompts[1]), rank=(8, 0)))
    assert device_overlap(index, *prompts[1], rank=(8, 0)) == 65_536
    for number, prompt in enumerate(prompts[2:], 1):
        index.apply(batch(number, stored(names, prompt)))
        assert device_overlap(index, *prompt) == 65_536
    others = hashes(65_536, 3)
    index.apply(batch(3, stored(others, prompts[3])))
    assert index.stats().blocks == 3 * 65_536
    index.apply(batch(4, removed(*names)))
    assert device_overlap(index, *prompts[3]) == 65_536


def test_a_long_chain_without_its_first_block(index: Any) -> None:
    """Its blocks float until their ancestors come again. Time for each that grows with its depth would be minutes."""
    chain = hashes(1 << 18)
    halves = chain[: 1 << 17], chain[1 << 17 :]

    def store(first: int, half: list[int], parent: int | None) -> None:
        parts = [half[: 1 << 16], half[1 << 16 :]]
        events = stored(parts[0], parts[0], parent=parent), stored(parts[1], parts[1], parent=parts[0][-1])
        assert index.apply(batch(first, *events, counting=SET)).stored_blocks == len(half)

    store(0, halves[0], None)
    store(2, halves[1], halves[0][-1])
    index.apply(batch(4, removed(chain[0]), counting=SET))
    index.load_rank(list(index.dump_rank((7, 0))))
    assert device_overlap(index, *chain) == 0
    store(5, halves[0], None)
    assert device_overlap(index, *chain) == len(chain)
    index.load_rank(list(index.dump_rank((7, 0))))
    assert device_overlap(index, *chain) == len(chain)
    store(7, halves[1], halves[0][-1])
    assert (index.stats().blocks, device_overlap(index, *chain)) == (len(chain), len(chain))


@pytest.mark.parametrize("workers", [1, 4])
def test_growth_to_a_million_blocks(index: Any, workers: int) -> None:
    """Tables double many times over; no batch of them moves more than the bound (checked by the fixture)."""
    for number in range(0, 1 << 20, 1 << 15):
        chain = hashes(1 << 15, number)
        for worker in range(workers):
            index.apply(batch(number >> 15, stored(chain, chain), rank=(worker, 0)))
    assert index.stats().blocks == workers << 20
    assert bytes_per_block(index) < 36 / workers
    assert index.most_moved() > 0
