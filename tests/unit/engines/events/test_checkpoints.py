"""How much of a prompt an engine of a hybrid model reuses, from its events, against the rules of vLLM's own lookup."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from kvrouter.core import local_hashes
from kvrouter.engines.events.translation import EventTranslator, TranslationOptions
from kvrouter.v1.common_pb2 import Tier

from .engine_frames import BLOCK, CLEARED, Engine, removed, stored, tokens

FULL = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
MAMBA = {"group_idx": 2, "kv_cache_spec_kind": "mamba"}


def window(blocks: int, group: int = 1) -> dict[str, Any]:
    """Fields of a group whose layers need this many blocks before the next token."""
    tokens_read = blocks * BLOCK + 1
    return {
        "group_idx": group,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": tokens_read,
    }


def masked(hashes: list[int], blocks: int, **fields: Any) -> dict[str, Any]:
    """Returns a store of some of the blocks from the start of a sequence, which are not told apart."""
    return stored(hashes, 0, token_ids=tokens(0, blocks), **fields)


def test_a_prefix_is_reused_up_to_where_the_window_is_held() -> None:
    engine = Engine()
    engine.publish(stored([1, 2, 3, 4, 5], 0, **FULL), stored([1, 2, 3, 4, 5], 0, **window(2)))
    assert [engine.overlap(tokens(0, blocks)) for blocks in range(1, 6)] == [1, 2, 3, 4, 5]
    engine.publish(removed([2], group_idx=1))
    assert [engine.overlap(tokens(0, blocks)) for blocks in range(1, 6)] == [1, 1, 1, 4, 5]
    engine.publish(removed([4], group_idx=1), removed([5], group_idx=0))
    assert [engine.overlap(tokens(0, blocks)) for blocks in range(1, 6)] == [1, 1, 1, 1, 1]
    assert not engine.rank.stats().partial
    assert not engine.left_out


def test_masked_blocks_are_known_by_their_hashes() -> None:
    engine = Engine()
    engine.publish(stored([1, 2, 3, 4], 0, **FULL), masked([3, 4], 4, **window(2)))
    assert [engine.overlap(tokens(0, blocks)) for blocks in range(1, 5)] == [0, 0, 0, 4]


def test_a_group_may_report_before_the_one_with_the_prefix() -> None:
    engine = Engine()
    engine.publish(stored([1, 2], 0, **window(4)), stored([1, 2], 0, **FULL))
    engine.publish(stored([3], 8, parent=2, **FULL))
    assert engine.overlap(tokens(0, 3)) == 2


def test_a_state_is_needed_of_the_last_block_only() -> None:
    engine = Engine()
    engine.publish(stored([1, 2, 3, 4], 0, **FULL), masked([2, 4], 4, **MAMBA))
    assert [engine.overlap(tokens(0, blocks)) for blocks in range(1, 5)] == [0, 2, 2, 4]


def test_every_group_must_be_able_to_go_on() -> None:
    engine = Engine()
    engine.publish(stored([1, 2, 3], 0, **FULL), stored([1, 2, 3], 0, **window(1)))
    assert engine.overlap(tokens(0, 3)) == 3
    engine.publish(masked([2], 3, **MAMBA))
    assert engine.overlap(tokens(0, 3)) == 2


def test_blocks_with_several_copies_go_with_the_last() -> None:
    engine = Engine()
    engine.publish(stored([1, 2], 0, **FULL), stored([1, 2], 0, **window(1)), masked([2], 2, **window(1)))
    engine.publish(removed([2], group_idx=1))
    assert engine.overlap(tokens(0, 2)) == 2
    engine.publish(removed([2], group_idx=1))
    assert engine.overlap(tokens(0, 2)) == 1


def test_reported_hits_are_no_blocks_of_a_window() -> None:
    engine = Engine()
    engine.publish(stored([1, 2, 3], 0, **FULL), masked([2, 3], 3, **window(1)))
    hits = {"session_id": "s"}
    engine.publish(stored([1, 2, 3], 0, **window(1), **hits), stored([1, 2, 3], 0, **FULL, **hits))
    assert engine.overlap(tokens(0, 1)) == 0
    engine.publish(removed([3], group_idx=1))
    assert engine.overlap(tokens(0, 3)) == 2


def test_a_session_stores_blocks_in_every_group() -> None:
    engine = Engine()
    session = {"session_id": "s"}
    engine.publish(stored([1, 2], 0, **window(2), **session), stored([1, 2], 0, **FULL, **session))
    engine.publish(stored([3], 8, parent=2, **FULL, **session))
    assert engine.overlap(tokens(0, 3)) == 2


def test_a_block_that_the_rank_has_again_is_a_checkpoint_again() -> None:
    engine = Engine()
    engine.publish(stored([1, 2], 0, **FULL), stored([1, 2], 0, **window(2)))
    engine.publish(removed([1], group_idx=1), removed([2], group_idx=0))
    engine.publish(stored([1], 0, **window(2)))
    engine.publish(stored([2], 4, parent=1, **FULL), stored([2], 4, parent=1, **window(2)))
    assert engine.overlap(tokens(0, 2)) == 2


def test_a_cleared_cache_has_no_checkpoints() -> None:
    engine = Engine()
    engine.publish(stored([1], 0, **FULL), stored([1], 0, **window(1)), CLEARED, stored([1, 2], 0, **FULL))
    assert engine.rank.stats().blocks == 2
    engine.publish(masked([2], 2, **window(1)))
    assert engine.overlap(tokens(0, 2)) == 2


def test_a_relay_that_resumed_goes_on_from_its_checkpoints() -> None:
    engine = Engine()
    engine.publish(stored([1, 2, 3], 0, **FULL), stored([1, 2, 3], 0, **window(2)))
    engine.translator = EventTranslator(engine.rank, TranslationOptions(BLOCK))
    engine.publish(stored([4], 12, parent=3, **FULL), stored([4], 12, parent=3, **window(2)))
    assert engine.overlap(tokens(0, 4)) == 4
    engine.publish(removed([2], group_idx=1))
    assert engine.overlap(tokens(0, 2)) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"group_idx": 1, "kv_cache_spec_kind": "chunked_local_attention"},
        {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"},
        window(2) | {"block_size": 2 * BLOCK},
    ],
    ids=["another kind", "no window", "another block size"],
)
def test_groups_that_cannot_be_judged_are_left_out(fields: dict[str, Any]) -> None:
    engine = Engine()
    engine.publish(stored([1, 2], 0, **FULL), stored([2], 0, token_ids=tokens(0, 2), **fields))
    engine.publish(removed([2], group_idx=1))
    assert engine.overlap(tokens(0, 2)) == 2
    assert engine.left_out == {"other_group": 2}


def test_blocks_of_several_parts_have_no_checkpoints() -> None:
    engine = Engine()
    large = {"token_ids": tokens(0, 4), "block_size": 2 * BLOCK}
    engine.publish(stored([1, 2], 0, **FULL, **large), stored([2], 0, **window(1)))
    assert engine.overlap(tokens(0, 4)) == 4
    assert engine.left_out == {"other_group": 1}


def test_offloaded_blocks_count_as_held() -> None:
    engine = Engine()
    moved = {"token_ids": [], "block_size": 0, "medium": "CPU"}
    engine.publish(stored([1, 2, 3], 0, **FULL), stored([1, 2, 3], 0, **window(1)))
    engine.publish(stored([2, 3], 0, **(window(1) | moved)), removed([3, 2], group_idx=1))
    assert engine.overlap(tokens(0, 3)) == 3
    engine.publish(removed([3], group_idx=1, medium="CPU"))
    assert engine.overlap(tokens(0, 3)) == 2


def test_a_rank_without_any_checkpoint_reuses_what_it_holds() -> None:
    engine = Engine()
    engine.publish(stored([1, 2], 0, **FULL), stored([1, 2], 0, **window(1)), removed([2, 1], group_idx=1))
    assert engine.overlap(tokens(0, 2)) == 2


TREE = {1: 0, 2: 1, 3: 2, 4: 3, 5: 4, 6: 3, 7: 6, 8: 1, 9: 8}
"""Parent of each block; 0 for none. A block's tokens follow from its number."""
GROUPS = {1: 2, 2: 1, 3: 4}
"""Window of each group."""


def path(block: int) -> list[int]:
    return [*path(TREE[block]), block] if block else []


def prompt(block: int) -> list[int]:
    return [token for each in path(block) for token in tokens(100 * each, 1)]


def store(block: int, **fields: Any) -> dict[str, Any]:
    return stored([block], 100 * block, parent=TREE[block] or None, **fields)


def reused(held: dict[int, Counter[int]], block: int) -> int:
    """What vLLM reuses of a prompt, by brute force over its length."""
    blocks = path(block)
    full = next((n for n, each in enumerate(blocks) if not held[0][each]), len(blocks))
    ends = (
        n
        for n in range(full, 0, -1)
        if all(held[group][each] for group, need in GROUPS.items() for each in blocks[max(0, n - need) : n])
    )
    return next(ends, 0)


def is_end(held: Counter[int], block: int) -> bool:
    """Returns whether none of the blocks right after a block is held."""
    return not any(held[child] for child, parent in TREE.items() if parent == block)


steps = st.lists(st.tuples(st.sampled_from(sorted(TREE)), st.integers(0, 3), st.booleans()), min_size=1, max_size=12)


@settings(max_examples=100, deadline=None)
@given(st.lists(steps, min_size=1, max_size=12))
def test_any_order_of_stores_and_removals(batches: list[list[tuple[int, int, bool]]]) -> None:
    engine = Engine()
    held: dict[int, Counter[int]] = {group: Counter() for group in range(4)}
    fields = {0: FULL} | {group: window(need, group) for group, need in GROUPS.items()}
    for block in TREE:
        for group in range(4):
            held[group][block] += 1
    engine.publish(*(store(block, **fields[group]) for block in TREE for group in range(4)))
    for batch in batches:
        events = []
        # An engine evicts nothing that a step uses, and the end of a prefix before its start.
        in_use = {each for block, group, is_stored in batch if is_stored and group for each in path(block)}
        for block, group, is_stored in batch:
            if is_stored and group:
                # An engine computes what is before a block.
                for each in path(block):
                    if not held[0][each]:
                        held[0][each] += 1
                        events.append(store(each, **FULL))
                held[group][block] += 1
                events.append(store(block, **fields[group]))
            elif not is_stored and held[group][block] and (group or (block not in in_use and is_end(held[0], block))):
                held[group][block] -= 1
                events.append(removed([block], group_idx=group))
        engine.publish(*events)
        if any(engine.rank.is_resident(block, tier=Tier.TIER_CHECKPOINT) for block in TREE):
            index = engine.index()
            found = {block: index.overlaps(local_hashes(prompt(block), BLOCK))[:4] for block in TREE}
            assert {block: int.from_bytes(overlap, "little") for block, overlap in found.items()} == {
                block: reused(held, block) for block in TREE
            }
