"""Popular prefixes are counted in bounded memory, and the longest common one stands for its beginnings."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from hypothesis import given, strategies as st
from kvrouter.frontend.recording.popular_prefixes import PopularPrefixes
from kvrouter.frontend.recording.recorder import Outline

BLOCK = 16


def outline(blocks: Sequence[int], model: str = "m") -> Outline:
    hashes = struct.pack(f"<{len(blocks)}Q", *blocks)
    return Outline(0, model, BLOCK, BLOCK * len(blocks), hashes, 1)


def counting(*prompts: Sequence[int]) -> PopularPrefixes:
    prefixes = PopularPrefixes(sample_every=1)
    for prompt in prompts:
        prefixes.note(outline(prompt))
    return prefixes


def test_the_longest_common_prefix_is_shown_once() -> None:
    system = list(range(8))
    prefixes = counting(*([*system, 100 + number, 200 + number] for number in range(10)))
    (top,) = prefixes.top(5)
    assert (top.tokens, top.requests) == (8 * BLOCK, 10)
    assert top.local_hashes == struct.pack("<8Q", *system)


def test_a_beginning_of_several_prefixes_is_shown_beside_them() -> None:
    prefixes = counting(*([1, 2, 3, 4] for _ in range(5)), *([1, 2, 7, 8] for _ in range(5)))
    assert sorted((top.tokens // BLOCK, top.requests) for top in prefixes.top(5)) == [(2, 10), (4, 5), (4, 5)]


def test_prompts_seen_once_and_other_models_are_apart() -> None:
    prefixes = counting([1, 2], [3, 4])
    assert prefixes.top(5) == []
    for _ in range(2):
        prefixes.note(outline([1, 2], model="other"))
    assert [top.model for top in prefixes.top(5)] == ["other"]


def test_one_request_in_four_is_counted_fourfold() -> None:
    prefixes = PopularPrefixes(sample_every=4)
    taken = [prefixes.wants_next() for _ in range(8)]
    assert taken == [True, False, False, False, True, False, False, False]
    for _ in range(2):
        prefixes.note(outline([1, 2]))
    assert [top.requests for top in prefixes.top(5)] == [8]


def test_counts_fade() -> None:
    prefixes = counting(*([1, 2] for _ in range(8)))
    prefixes.age()
    assert [top.requests for top in prefixes.top(5)] == [4]
    for _ in range(4):
        prefixes.age()
    assert len(prefixes) == 0


@given(st.lists(st.lists(st.integers(0, 1 << 63), min_size=1, max_size=40), max_size=200))
def test_memory_is_bounded(prompts: list[list[int]]) -> None:
    prefixes = PopularPrefixes(capacity=16, sample_every=1)
    for prompt in prompts:
        prefixes.note(outline(prompt))
        assert len(prefixes) <= 32 + 6
    assert all(len(top.local_hashes) % 8 == 0 for top in prefixes.top(100))
