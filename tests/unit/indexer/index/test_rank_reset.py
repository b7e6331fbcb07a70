from __future__ import annotations

from kvrouter.core import ApplySummary
from kvrouter.indexer.index.rank_reset import RankReset, reset_after


def summary(**facts: object) -> ApplySummary:
    return ApplySummary(1, 0, incarnation=7, next_event_id=20, **facts)  # type: ignore[arg-type]


def test_a_clean_batch_needs_no_reset() -> None:
    assert reset_after(summary(applied=3, stored_blocks=9), was_partial=False) is None


def test_a_gap_drops_the_rank_and_goes_on_past_it() -> None:
    assert reset_after(summary(gap=(20, 25)), was_partial=False) == RankReset("gap", 7, 25, reapply=True)


def test_a_gap_on_a_partial_rank_drops_it_too_since_removals_may_be_among_the_missing() -> None:
    assert reset_after(summary(gap=(20, 25)), was_partial=True) == RankReset("gap", 7, 25, reapply=True)


def test_an_unknown_parent_drops_the_rank() -> None:
    assert reset_after(summary(unknown_parents=1), was_partial=False) == RankReset(
        "unknown_parent", 7, 20, reapply=False
    )


def test_an_unknown_parent_is_expected_on_a_partial_rank() -> None:
    assert reset_after(summary(unknown_parents=1), was_partial=True) is None


def test_a_gap_comes_before_an_unknown_parent() -> None:
    reset = reset_after(summary(unknown_parents=1, gap=(20, 25)), was_partial=False)
    assert reset is not None
    assert (reset.reason, reset.next_event_id) == ("gap", 25)


def test_drift_drops_the_rank() -> None:
    assert reset_after(summary(digest_differs=True), was_partial=False) == RankReset("drift", 7, 20, reapply=False)


def test_refused_events_drop_the_rank_since_removals_may_be_among_them() -> None:
    for was_partial in (False, True):
        reset = reset_after(summary(rejected=("no change",)), was_partial=was_partial)
        assert reset == RankReset("rejected", 7, 20, reapply=False)


def test_unknown_removals_leave_the_blocks() -> None:
    assert reset_after(summary(unknown_removals=2), was_partial=False) is None


def test_what_cannot_be_read_touches_no_rank() -> None:
    assert reset_after(ApplySummary(0, 0, unparsable="truncated", gap=(1, 2)), was_partial=False) is None
