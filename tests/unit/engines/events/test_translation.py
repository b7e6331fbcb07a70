"""What each engine's events do to its rank, compared with an index that applied what was published."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st
from kvrouter.core import Scope, multimodal_hash
from kvrouter.v1.common_pb2 import CopyCounting, Tier

from .engine_frames import BLOCK, CLEARED, Engine, payload, removed, stored, tokens

SET = CopyCounting.COPY_COUNTING_SET


def test_a_chain_is_stored_extended_and_evicted() -> None:
    engine = Engine()
    engine.publish(stored([1, 2], 0), stored([3], 8, parent=2))
    assert engine.overlap(tokens(0, 3)) == 3
    engine.publish(removed([3]))
    assert engine.overlap(tokens(0, 3)) == 2
    engine.publish(CLEARED)
    assert engine.overlap(tokens(0, 3)) == 0


def test_an_engine_that_counts_copies() -> None:
    engine = Engine()
    engine.publish(stored([1, 2], 0), stored([2], 4, parent=1), removed([2]))
    assert engine.overlap(tokens(0, 2)) == 2
    engine.publish(removed([2]))
    assert engine.overlap(tokens(0, 2)) == 1


def test_an_engine_that_reports_a_set() -> None:
    engine = Engine(copy_counting=SET)
    engine.publish(stored([1, 2], 0), stored([2], 4, parent=1), removed([2]))
    assert engine.overlap(tokens(0, 2)) == 1


@pytest.mark.parametrize("mark", [{"session_id": "s"}, {"origin": "REUSED"}])
def test_reported_hits_are_no_new_copies(mark: dict[str, str]) -> None:
    engine = Engine()
    engine.publish(stored([1, 2], 0), stored([1, 2], 0, **mark), removed([2]), removed([1]))
    assert engine.rank.stats().blocks == 0


def test_a_store_of_a_session_that_is_new_counts() -> None:
    engine = Engine()
    engine.publish(stored([1], 0, session_id="s"), stored([2], 4, parent=1, session_id="s"))
    engine.publish(stored([2], 4, parent=1, session_id="s"), removed([2]))
    assert engine.overlap(tokens(0, 2)) == 2


def test_reports_of_hits_can_be_announced() -> None:
    engine = Engine(full_reports=True)
    engine.publish(stored([1, 2], 0), stored([1, 2], 0), removed([2]), removed([1]))
    assert engine.rank.stats().blocks == 0


def test_parents_are_removed_before_their_children() -> None:
    engine = Engine()
    engine.publish(stored([1, 2, 3], 0), removed([1, 2]), stored([1], 0))
    assert engine.overlap(tokens(0, 3)) == 1
    engine.publish(stored([2], 4, parent=1))
    assert engine.overlap(tokens(0, 3)) == 3


def test_a_leading_clear_leaves_the_rank_complete() -> None:
    engine = Engine()
    engine.publish(CLEARED, stored([1], 0))
    assert not engine.rank.stats().partial


def test_groups_of_a_hybrid_model_are_kept_apart() -> None:
    engine = Engine()
    full = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    engine.publish(stored([1, 2], 0, **full), stored([1, 2], 0, **window), stored([3], 8, parent=2, **full))
    engine.publish(removed([1], group_idx=1), removed([2], group_idx=1))
    assert engine.overlap(tokens(0, 3)) == 3
    engine.publish(removed([3], group_idx=0))
    assert engine.overlap(tokens(0, 3)) == 2
    assert engine.left_out == {"other_group": 3}
    assert not engine.rank.stats().partial


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("full_attention", True),
        ("mla_attention", True),
        ("sink_full_attention", True),
        ("sliding_window", False),
        ("mamba", False),
        ("chunked_local_attention", False),
    ],
)
@pytest.mark.parametrize("group", [None, 0, 3])
def test_the_kind_of_a_group_decides(kind: str, kept: bool, group: int | None) -> None:
    engine = Engine()
    engine.publish(stored([1], 0, group_idx=group, kv_cache_spec_kind=kind))
    assert engine.overlap(tokens(0, 1)) == int(kept)


def test_of_groups_without_a_kind_the_first_is_kept() -> None:
    engine = Engine()
    engine.publish(stored([1], 0, group_idx=1), stored([1], 0, group_idx=0), removed([1], group_idx=1))
    assert engine.overlap(tokens(0, 1)) == 1


def test_a_removal_from_a_group_without_a_store_yet_counts() -> None:
    engine = Engine()
    # As in a relay that resumed: what its rank holds is known, but not which groups there are.
    engine.publish(stored([1, 2], 0), stored([1], 0, group_idx=1, kv_cache_spec_kind="sliding_window"))
    engine.publish(removed([2], group_idx=0))
    assert engine.overlap(tokens(0, 2)) == 1


def test_masked_blocks_are_not_matched_by_position() -> None:
    engine = Engine()
    engine.publish(stored([5], 0, token_ids=tokens(0, 3)))
    assert engine.left_out == {"masked_blocks": 1}
    assert engine.rank.stats().blocks == 0


def test_a_part_of_a_block_is_promoted() -> None:
    engine = Engine()
    part = stored([50], 4, parent=1, token_ids=[4, 5], block_size=2)
    engine.publish(stored([1], 0), part, removed([50]), stored([2], 4, parent=1))
    assert engine.overlap(tokens(0, 2)) == 2
    assert engine.left_out == {"partial_block": 1}
    assert engine.rank.stats().unknown_removals == 0


@pytest.mark.parametrize("size", [0, 3, 6])
def test_a_block_of_another_size_is_left_out(size: int) -> None:
    engine = Engine()
    engine.publish(stored([1], 0, block_size=size, token_ids=[1] * (size or 1)))
    assert engine.left_out == {"block_size": 1}
    assert engine.rank.stats().partial


def test_a_larger_block_is_divided() -> None:
    engine = Engine()
    engine.publish(stored([1], 0, token_ids=tokens(0, 3), block_size=3 * BLOCK, medium="CPU"))
    assert engine.overlap(tokens(0, 4), tier=Tier.TIER_HOST) == 3
    engine.publish(removed([1], medium="CPU"))
    assert engine.rank.stats().blocks == 0


def test_an_offloaded_block_keeps_its_salt() -> None:
    engine = Engine()
    engine.publish(stored([1, 2], 0, extra_keys=[["salt"], []]), stored([1, 2], 0, medium="CPU", extra_keys=None))
    for tier in (Tier.TIER_DEVICE, Tier.TIER_HOST):
        assert engine.overlap(tokens(0, 2), scope=Scope(cache_salt="salt"), tier=tier) == 2
        assert engine.overlap(tokens(0, 2), tier=tier) == 0
    engine.publish(removed([2, 1]), removed([2], medium="CPU"))
    assert engine.overlap(tokens(0, 2), scope=Scope(cache_salt="salt"), tier=Tier.TIER_HOST) == 1
    assert engine.rank.stats().unknown_removals == 0


def test_fewer_tokens_than_blocks_are_refused() -> None:
    engine = Engine()
    engine.publish(stored([1, 2], 0, token_ids=tokens(0, 1)))
    assert engine.left_out == {"invalid": 1}


def test_offloading_by_hash_alone() -> None:
    engine = Engine()
    engine.publish(stored([1, 2], 0))
    engine.publish(stored([1, 2], 0, token_ids=[], block_size=0, medium="CPU"), removed([1, 2]))
    assert engine.overlap(tokens(0, 2)) == 0
    assert engine.overlap(tokens(0, 2), tier=Tier.TIER_HOST) == 2
    engine.publish(stored([77], 0, token_ids=[], block_size=0, medium="CPU"), removed([1, 2], medium="CPU"))
    assert engine.left_out == {"unknown_block": 1}
    assert engine.rank.stats().blocks == 0


def test_a_chunk_offloaded_by_its_last_hash_is_all_of_its_blocks() -> None:
    engine = Engine(offloaded_blocks=2)
    engine.publish(stored([1, 2, 3, 4], 0), stored([5, 6], 40, parent=2))
    # Two chunks that begin with the same block, and one that does not.
    engine.publish(stored([2, 4], 0, token_ids=[], block_size=0, medium="CPU"), removed([4, 3, 2, 1]))
    assert engine.overlap(tokens(0, 4), tier=Tier.TIER_HOST) == 4
    assert engine.left_out == {}
    engine.publish(removed([4], medium="CPU"))
    assert engine.overlap(tokens(0, 4), tier=Tier.TIER_HOST) == 2
    engine.publish(removed([2], medium="CPU"), removed([6, 5]))
    assert engine.rank.stats().blocks == 0
    assert engine.rank.stats().unknown_removals == 0


def test_chunks_that_share_a_block_are_offloaded_and_removed_apart() -> None:
    engine = Engine(offloaded_blocks=2)
    engine.publish(stored([1, 2], 0), stored([3], 40, parent=1))
    engine.publish(stored([2, 3], 0, token_ids=[], block_size=0, medium="CPU"), removed([3, 2, 1]))
    engine.publish(removed([2], medium="CPU"))
    assert engine.overlap(tokens(0, 1) + tokens(40, 1), tier=Tier.TIER_HOST) == 2
    engine.publish(removed([3], medium="CPU"))
    assert engine.rank.stats().blocks == 0


@pytest.mark.parametrize("counting", [SET, CopyCounting.COPY_COUNTING_COUNTED])
def test_offloading_known_blocks_again_leaves_nothing_out(counting: CopyCounting) -> None:
    engine = Engine(copy_counting=counting)
    engine.publish(stored([9], 0, token_ids=tokens(0, 3), block_size=3 * BLOCK))
    engine.publish(*2 * [stored([9], 0, token_ids=[], block_size=0, medium="CPU")])
    assert engine.left_out == {}
    assert engine.overlap(tokens(0, 3), tier=Tier.TIER_HOST) == 3


def test_offloading_that_describes_itself() -> None:
    engine = Engine()
    engine.publish(stored([1, 2], 0), *2 * [stored([1, 2], 0, medium="CPU")], removed([1, 2]))
    engine.publish(removed([1, 2], medium="CPU"))
    assert engine.overlap(tokens(0, 2), tier=Tier.TIER_HOST) == 2


def test_a_block_moves_through_the_tiers_and_back() -> None:
    engine = Engine("sglang")
    engine.publish(stored([-1], 0), stored([-1], 0, medium="CPU_PINNED"), removed([-1]))
    assert engine.overlap(tokens(0, 1)) == 0
    assert engine.overlap(tokens(0, 1), tier=Tier.TIER_HOST) == 1
    engine.publish(stored([-1], 0), removed([-1], medium="CPU_PINNED"))
    assert engine.overlap(tokens(0, 1)) == 1
    engine.publish(removed([-1]))
    assert engine.rank.stats().blocks == 0


def test_pairs_of_speculative_decoding_are_the_tokens_of_the_prompt() -> None:
    engine = Engine("sglang")
    pairs = [[token, token + 1] for token in tokens(0, 2)]
    engine.publish(stored([1, 2], 0, token_ids=pairs))
    assert engine.overlap(tokens(0, 2)) == 2


def test_blocks_in_another_engine_are_left_out() -> None:
    engine = Engine()
    engine.publish(stored([1], 0, locality="REMOTE"), stored([2], 0), removed([2], locality="REMOTE"))
    assert engine.overlap(tokens(0, 1)) == 1
    assert engine.left_out == {"remote": 2}
    assert not engine.rank.stats().partial


@pytest.mark.parametrize(
    ("fields", "names", "expected"),
    [
        ({"lora_name": "adapter", "lora_id": 7, "extra_keys": [["adapter"]]}, {}, Scope(lora_name="adapter")),
        ({"lora_id": 7}, {7: "adapter"}, Scope(lora_name="adapter")),
        ({"lora_id": 7}, {}, Scope(lora_name="7")),
        ({"lora_id": 0}, {}, Scope()),
        ({"lora_id": "adapter"}, {}, Scope(lora_name="adapter")),
        ({"cache_salt": "salt"}, {}, Scope(cache_salt="salt")),
        ({"extra_keys": [["salt"]]}, {}, Scope(cache_salt="salt")),
        ({"extra_keys": [["tenant:a%3Ab:salt"]]}, {}, Scope(cache_salt="salt", tenant="a:b")),
        ({"extra_keys": ["salt"]}, {}, Scope(cache_salt="salt")),
        (
            {"lora_name": "adapter", "extra_keys": [["adapter", "salt"]]},
            {},
            Scope(lora_name="adapter", cache_salt="salt"),
        ),
        ({"extra_keys": [None]}, {}, Scope()),
        ({"extra_keys": []}, {}, Scope()),
    ],
    ids=str,
)
def test_the_scope_of_a_sequence(fields: dict[str, Any], names: dict[int, str], expected: Scope) -> None:
    engine = Engine(lora_names=names)
    engine.publish(stored([1], 0, **fields), stored([2], 4, parent=1))
    assert engine.overlap(tokens(0, 2), scope=expected) == 2


def test_a_later_block_that_repeats_the_adapter_inherits_the_salt() -> None:
    engine = Engine()
    adapter = {"lora_name": "adapter"}
    engine.publish(stored([1], 0, extra_keys=[["adapter", "salt"]], **adapter))
    engine.publish(stored([2], 4, parent=1, extra_keys=[["adapter"]], **adapter))
    assert engine.overlap(tokens(0, 2), scope=Scope(lora_name="adapter", cache_salt="salt")) == 2


def test_a_string_in_a_later_block_is_no_salt() -> None:
    engine = Engine()
    engine.publish(stored([1, 2], 0, extra_keys=[None, ["text"]]), stored([3], 8, parent=2, extra_keys=[["text"]]))
    assert engine.overlap(tokens(0, 3)) == 3


def test_two_salts_are_refused() -> None:
    engine = Engine()
    engine.publish(stored([1], 0, extra_keys=[["one", "two"]]))
    assert engine.left_out == {"extra_keys": 1}


def test_content_belongs_to_the_block_that_it_starts_in() -> None:
    engine = Engine()
    keys = [[["image", 2]], [["image", -2], ["video", 0]], [["video", -4], b"embedding"], None]
    engine.publish(stored([1, 2, 3, 4], 0, extra_keys=keys))
    pairs = [(0, "image"), (1, "video"), (2, b"embedding")]
    multimodal = [(block, multimodal_hash(content)) for block, content in pairs]
    assert engine.overlap(tokens(0, 4), multimodal=multimodal) == 4
    assert engine.overlap(tokens(0, 4)) == 0


def test_content_in_a_larger_block_belongs_to_a_part_of_it() -> None:
    engine = Engine()
    keys = [[["image", 5]]]
    engine.publish(stored([1], 0, token_ids=tokens(0, 2), block_size=2 * BLOCK, extra_keys=keys))
    assert engine.overlap(tokens(0, 2), multimodal=[(1, multimodal_hash("image"))]) == 2


@pytest.mark.parametrize("key", [None, 5, ["image"], ["image", "0"], ["image", BLOCK], [None, 0], {"a": 1}])
def test_an_unknown_key_is_refused(key: Any) -> None:
    engine = Engine()
    engine.publish(stored([1], 0, extra_keys=[[key]]))
    assert engine.left_out == {"extra_keys": 1}


@pytest.mark.parametrize("event", [stored([1, 1], 0), stored([1, 2], 0, parent=2)], ids=["twice", "own-parent"])
def test_a_store_that_contradicts_itself_is_left_out(event: dict[str, Any]) -> None:
    engine = Engine()
    engine.publish(stored([2], 0), event, stored([3], 4, parent=2))
    assert engine.left_out == {"invalid": 1}
    assert engine.overlap(tokens(0, 2)) == 2


def test_a_store_below_an_unknown_parent_makes_the_rank_partial() -> None:
    engine = Engine()
    engine.publish(stored([1], 0), stored([2], 4, parent=99), removed([2]))
    assert engine.left_out == {"unknown_parent": 1}
    assert engine.rank.stats().partial
    assert engine.overlap(tokens(0, 1)) == 1


def test_what_is_malformed_costs_nothing_else() -> None:
    engine = Engine()
    engine.publish(stored([1], 0), ["BlockStored"], {"type": "Other"}, removed([1, "x"]), stored([2], 0, medium="TAPE"))
    assert engine.left_out == {"malformed": 2, "unknown_type": 1, "unknown_medium": 1}
    assert engine.translator.applied == 2
    assert engine.rank.stats().blocks == 0


def test_a_restart_of_the_engine() -> None:
    engine = Engine()
    engine.publish(stored([1], 0, group_idx=1, kv_cache_spec_kind="full_attention"))
    engine.translator.restarted()
    engine.publish(stored([2], 8, group_idx=0, kv_cache_spec_kind="full_attention"), removed([2], group_idx=0))
    assert engine.rank.stats().blocks == 0
    assert not engine.rank.stats().partial


def test_a_loss_of_messages() -> None:
    engine = Engine()
    engine.publish(stored([1], 0))
    engine.translator.lost("gap")
    engine.publish(stored([2], 4, parent=1))
    assert engine.left_out == {"gap": 1, "unknown_parent": 1}
    assert engine.rank.stats().partial


HASHES = st.lists(st.integers(1, 5), min_size=1, max_size=3)
EVENTS = st.one_of(
    st.builds(stored, HASHES, st.integers(0, 2).map(lambda block: block * BLOCK), st.none() | st.integers(1, 6)),
    st.builds(removed, HASHES),
    st.just(CLEARED),
    st.builds(lambda hashes: stored(hashes, 0, token_ids=[], block_size=0, medium="CPU"), HASHES),
    st.builds(lambda hashes: removed(hashes, medium="CPU"), HASHES),
    st.builds(lambda h: stored([h], 0, token_ids=tokens(0, 2), block_size=2 * BLOCK), st.integers(1, 6)),
)


@given(st.lists(st.lists(EVENTS, max_size=4), max_size=6), st.sampled_from([SET, CopyCounting.COPY_COUNTING_COUNTED]))
def test_the_index_equals_the_publisher_after_any_history(history: list[list[Any]], counting: CopyCounting) -> None:
    engine = Engine(copy_counting=counting)
    for events in history:
        engine.receive(payload(*events))
    engine.index()
