"""What the cache reuses, stores and evicts, example by example. Engines have 10 blocks of 4 tokens."""

from __future__ import annotations

from array import array

import pytest
from kvrouter.mocker.engine.types import UNSCOPED, Cleared, Removed, Scope, Stored, pack_tokens

from .engine_harness import Drive, check_blocks, counted, engine, resident_copies


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (30, 12)])
def test_reuse_stops_before_the_last_token(length: int, cached: int) -> None:
    drive = Drive(engine())
    drive.run("a", range(12))
    assert drive.run("b", [*range(12), *range(50, 70)][:length])[0].cached_tokens == cached


def test_only_full_blocks_are_cached() -> None:
    drive = Drive(engine())
    drive.run("a", range(7))
    assert [b.tokens for b in drive.engine.cached_blocks().values()] == [pack_tokens(range(4))]


def test_reuse_ends_at_the_first_difference() -> None:
    drive = Drive(engine())
    drive.run("a", range(12))
    assert drive.run("b", [0, 1, 2, 3, 9, 5, 6, 7, 8, 9, 10, 11, 12])[0].cached_tokens == 4
    assert drive.run("c", range(4, 13))[0].cached_tokens == 0, "equal blocks after another beginning never match"


def test_events_name_parent_tokens_and_scope() -> None:
    drive = Drive(engine(max_batched_tokens=8))
    drive.run("a", range(12))
    first, second = drive.events
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert (first.parent_hash, first.scope) == (None, UNSCOPED)
    assert first.tokens == pack_tokens(range(8))
    assert second.parent_hash == first.engine_hashes[1]
    assert second.tokens == pack_tokens(range(8, 12))


def test_blocks_are_cached_when_scheduled_also_for_later_requests_of_the_step() -> None:
    drive = Drive(engine())
    drive.submit("a", range(9))
    drive.submit("b", range(9))
    step = drive.begin()
    assert step.prefill_tokens == 9 + 1
    assert resident_copies(drive.engine) == counted(step.events)
    assert {o.request_id: o.cached_tokens for o in drive.end()} == {"a": 0, "b": 8}


def test_output_fills_blocks_which_are_cached_once_computed() -> None:
    drive = Drive(engine())
    outputs = drive.run("a", range(6), 7)  # 13 tokens, of which the last is never computed
    known = [*range(6), *(o.token_ids[0] for o in outputs)]
    assert [b.tokens for b in drive.engine.cached_blocks().values()] == [
        pack_tokens(known[i : i + 4]) for i in (0, 4, 8)
    ]
    assert drive.run("b", known)[0].cached_tokens == 12
    # the block that the sixth output token fills is stored by the step that computes this token, the seventh
    assert [sum(len(e.engine_hashes) for e in s.events if isinstance(e, Stored)) for s in drive.steps[:7]] == [
        1, 0, 1, 0, 0, 0, 1,
    ]  # fmt: skip


def test_a_wholly_cached_prompt_stores_its_last_block_a_second_time() -> None:
    drive = Drive(engine())
    drive.run("a", range(8))
    drive.run("b", range(8))
    first, second = drive.events
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert second.engine_hashes == first.engine_hashes[1:]
    assert second.parent_hash == first.engine_hashes[0]
    assert [b.copies for b in drive.engine.cached_blocks().values()] == [1, 2]
    assert drive.engine.load().cached_blocks == 3


def test_each_copy_is_removed_on_its_own() -> None:
    drive = Drive(engine())
    drive.run("a", range(8))
    drive.run("b", range(8))  # 3 idle blocks, 7 empty ones
    _, twice = drive.engine.cached_blocks()
    drive.run("c", range(100, 132))  # 8 blocks: evicts one copy
    assert drive.events[-2] == Removed(array("Q", [twice]))
    assert drive.engine.cached_blocks()[twice].copies == 1
    assert drive.run("d", range(9))[0].cached_tokens == 8


def test_eviction_is_least_recently_used_first_and_tails_first() -> None:
    drive = Drive(engine())
    drive.run("a", range(12))
    drive.run("b", range(100, 112))
    drive.run("c", [*range(12), 12])  # uses a's blocks again
    table = {b.tokens: engine_hash for engine_hash, b in drive.engine.cached_blocks().items()}
    b_hashes = [table[pack_tokens(range(i, i + 4))] for i in (100, 104, 108)]
    a_hashes = [table[pack_tokens(range(i, i + 4))] for i in (0, 4, 8)]
    drive.run("d", range(200, 232))  # 8 blocks, of which 4 are empty
    removed = [h for e in drive.events if isinstance(e, Removed) for h in e.engine_hashes]
    assert removed == [*reversed(b_hashes), a_hashes[2]]


def test_what_is_in_use_is_never_evicted() -> None:
    drive = Drive(engine(max_batched_tokens=64))
    drive.submit("a", range(16), 20)
    drive.step()
    for i in range(4):
        drive.submit(str(i), range(100 * i + 100, 100 * i + 116))
        drive.step()
        check_blocks(drive.engine)
    assert drive.run("b", range(17))[0].cached_tokens == 16
    assert any(isinstance(e, Removed) for e in drive.events)


@pytest.mark.parametrize("other", [Scope(lora_name="x"), Scope(cache_salt="x"), Scope(tenant="x")])
def test_equal_tokens_of_another_scope_never_match(other: Scope) -> None:
    drive = Drive(engine())
    drive.run("a", range(9))
    assert drive.run("b", range(9), scope=other)[0].cached_tokens == 0
    assert drive.run("c", range(9), scope=other)[0].cached_tokens == 8
    table = drive.engine.cached_blocks()
    assert len(table) == 4
    assert [b.scope for b in table.values()] == [UNSCOPED] * 2 + [other] * 2


def test_parts_of_a_scope_do_not_run_together() -> None:
    drive = Drive(engine())
    drive.run("a", range(9), scope=Scope("ab", "c"))
    assert drive.run("b", range(9), scope=Scope("a", "bc"))[0].cached_tokens == 0


def test_engine_hashes_follow_content_and_seed() -> None:
    def hashes(**changes: object) -> list[int]:
        drive = Drive(engine(**changes))
        drive.run("a", range(12))
        return list(drive.engine.cached_blocks())

    assert hashes() == hashes()
    assert not set(hashes()) & set(hashes(hash_seed=1))
    assert all(0 <= h < 1 << 64 for h in hashes())


def test_without_prefix_caching_nothing_is_reused_or_reported() -> None:
    drive = Drive(engine(prefix_caching=False))
    drive.run("a", range(9), 9)
    assert drive.run("b", range(9))[0].cached_tokens == 0
    assert (drive.events, drive.engine.cached_blocks()) == ([], {})
    assert drive.engine.load().active_blocks == 0


def test_clearing_an_idle_engine_is_a_step_of_its_own() -> None:
    drive = Drive(engine())
    drive.run("a", range(9))
    drive.engine.clear_cache()
    step, outputs = drive.step()
    assert (step.events, step.duration, outputs) == ((Cleared(),), 0.0, [])
    assert drive.engine.begin_step(drive.now) is None
    assert drive.run("b", range(9))[0].cached_tokens == 0


def test_clearing_a_busy_engine_computes_its_requests_again() -> None:
    drive = Drive(engine(max_batched_tokens=64))
    drive.submit("a", range(9), 5)
    drive.submit("b", range(9), 5)
    drive.step()
    drive.begin()
    drive.engine.clear_cache()
    assert len(drive.end()) == 2, "the step under way is not touched"
    step, outputs = drive.step()
    assert step.events[0] == Cleared()
    assert (step.prefill_tokens, [o.request_id for o in outputs]) == (11 + 3, ["a", "b"])
    assert resident_copies(drive.engine) == counted(drive.events)
    drive.drain()
    assert [len([o for o in drive.outputs if o.request_id == name]) for name in "ab"] == [5, 5]
