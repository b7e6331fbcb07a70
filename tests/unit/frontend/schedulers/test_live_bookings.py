"""Which Scheduler receives a live booking after a session moved, and what it receives."""

from __future__ import annotations

from hypothesis import given, strategies as st
from kvrouter.core import local_hashes
from kvrouter.frontend.schedulers.booking_updates import BookingUpdates, LiveBooking
from kvrouter.frontend.schedulers.scheduler_choice import rendezvous
from kvrouter.v1.common_pb2 import BookingKey, Rank
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import SelectWorkerResponse


def booking(prompt_tokens: int = 40, overlap: int = 1) -> LiveBooking:
    selection = SelectWorkerResponse(rank=Rank(worker_id=1), overlap_blocks=overlap)
    hashes = local_hashes(list(range(prompt_tokens)), 16)
    return LiveBooking.of(BookingKey(request_id="r"), selection, hashes, prompt_tokens, 16)


def test_a_reassertion_contains_the_booking_and_its_progress() -> None:
    live = booking()
    live.prefill_complete = True
    live.output_tokens = 3
    sent = live.to_reassert()
    assert len(sent.sequence_hashes) == 2
    assert (sent.prompt_tokens, sent.prefill_tokens) == (40, 24)
    assert sent.prefill_complete
    assert sent.output_tokens == 3
    assert not sent.HasField("sequences")
    live.sequences = 4
    assert live.to_reassert().sequences == 4


@given(st.integers(1, 200), st.integers(0, 100), st.integers(1, 50))
def test_output_is_reported_when_the_count_of_blocks_rises(prompt: int, before: int, more: int) -> None:
    live, updates = booking(prompt, 0), BookingUpdates("s", "c")
    updates.report_output(live, before)
    blocks = lambda tokens: (tokens + 15) // 16  # noqa: E731
    updates.next_call()
    updates.report_output(live, before + more)
    is_reported = updates.has_unsent
    assert is_reported == (blocks(prompt + before + more) > blocks(prompt + before))


@given(st.sets(st.text("abcdef0123", min_size=1), min_size=1), st.data())
def test_when_a_scheduler_goes_only_its_components_move(ids: set[str], data: st.DataObject) -> None:
    component = ComponentName("ns", data.draw(st.text("xyz", min_size=1, max_size=8)))
    chosen = rendezvous(component, ids)
    assert chosen == rendezvous(component, sorted(ids, reverse=True))
    gone = data.draw(st.sampled_from(sorted(ids)))
    if gone != chosen:
        assert rendezvous(component, ids - {gone}) == chosen


def test_without_schedulers_there_is_none() -> None:
    assert rendezvous(ComponentName("ns", "c"), []) is None
