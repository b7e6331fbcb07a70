from __future__ import annotations

from kvrouter.core import ApplySummary
from kvrouter.indexer.index.repair import Repair, repair_after


def summary(**facts: object) -> ApplySummary:
    return ApplySummary(1, 0, incarnation=7, next_event_id=20, **facts)  # type: ignore[arg-type]


def test_a_clean_batch_needs_no_repair() -> None:
    assert repair_after(summary(applied=3, stored_blocks=9), was_partial=False) is None


def test_a_gap_drops_the_rank_and_goes_on_past_it() -> None:
    assert repair_after(summary(gap=(20, 25)), was_partial=False) == Repair("gap", 7, 25, reapply=True)


def test_a_gap_on_a_partial_rank_drops_it_too_since_removals_may_be_among_the_missing() -> None:
    assert repair_after(summary(gap=(20, 25)), was_partial=True) == Repair("gap", 7, 25, reapply=True)


def test_an_unknown_parent_drops_the_rank() -> None:
    assert repair_after(summary(unknown_parents=1), was_partial=False) == Repair("unknown_parent", 7, 20, reapply=False)


def test_an_unknown_parent_is_expected_on_a_partial_rank() -> None:
    assert repair_after(summary(unknown_parents=1), was_partial=True) is None


def test_a_gap_comes_before_an_unknown_parent() -> None:
    repair = repair_after(summary(unknown_parents=1, gap=(20, 25)), was_partial=False)
    assert repair is not None
    assert (repair.reason, repair.next_event_id) == ("gap", 25)


def test_drift_drops_the_rank() -> None:
    assert repair_after(summary(digest_differs=True), was_partial=False) == Repair("drift", 7, 20, reapply=False)


def test_refused_events_drop_the_rank_since_removals_may_be_among_them() -> None:
    for was_partial in (False, True):
        repair = repair_after(summary(rejected=("no change",)), was_partial=was_partial)
        assert repair == Repair("rejected", 7, 20, reapply=False)


def test_unknown_removals_leave_the_blocks() -> None:
    assert repair_after(summary(unknown_removals=2), was_partial=False) is None


def test_what_cannot_be_read_touches_no_rank() -> None:
    assert repair_after(ApplySummary(0, 0, unparsable="truncated", gap=(1, 2)), was_partial=False) is None
