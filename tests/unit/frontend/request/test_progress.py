"""What an attempt reports while its output passes."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given, strategies as st
from kvrouter.frontend.metrics import MetricsByModel
from kvrouter.frontend.request.progress import Progress
from kvrouter.frontend.request.routed import Routed
from kvrouter.frontend.schedulers.booking_updates import BookingUpdates, LiveBooking
from kvrouter.frontend.schedulers.scheduler_link import SchedulerLink
from kvrouter.frontend.workers.output import DetailedOutput, Output
from kvrouter.v1.common_pb2 import BookingKey, LowerTiers
from kvrouter.v1.scheduler_pb2 import SelectWorkerResponse
from kvrouter.v1.worker_pb2 import FinishReason
from prometheus_client import CollectorRegistry


class Link:
    def __init__(self) -> None:
        self.updates = BookingUpdates("s", "c")
        self.reported: list[int] = []
        self.prefills = 0
        self.freed: list[int | None] = []
        self.prefilled_by_free: list[bool] = []

    def prefill_complete(self, _: LiveBooking, *, handover_us: int | None) -> None:
        self.prefills += 1

    def report_output(self, booking: LiveBooking, output_tokens: int) -> None:
        assert output_tokens > booking.room, "a report that the link would drop"
        self.updates.report_output(booking, output_tokens)
        self.reported.append(output_tokens)

    def free(self, _: LiveBooking, cached_tokens: int | None, *, prefill_complete: bool, **further: object) -> None:
        self.freed.append(cached_tokens)
        self.further = further
        self.prefilled_by_free.append(prefill_complete)


class Handover(Link):
    def __init__(self) -> None:
        super().__init__()
        self.handovers: list[int] = []

    def prefill_complete(self, _: LiveBooking, *, handover_us: int | None = None) -> None:
        self.handovers.append(handover_us)


class Received:
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def routed(self, routing: Routed) -> None: ...

    def output(self, output: Output) -> None:
        self.tokens += output.token_ids


@given(prompt=st.integers(1, 70), block_size=st.sampled_from([1, 4, 16]), sizes=st.lists(st.integers(0, 40)))
def test_every_block_that_output_fills_is_reported_and_every_token_is_counted(
    prompt: int, block_size: int, sizes: list[int]
) -> None:
    def fresh() -> LiveBooking:
        return LiveBooking.of(BookingKey(request_id="r"), SelectWorkerResponse(), b"", prompt, block_size)

    registry, link, received = CollectorRegistry(), Link(), Received()
    metrics = MetricsByModel(registry).of("llama")
    progress = Progress(fresh(), cast(SchedulerLink, link), received, metrics, since_ns=0)
    expected, reference, total = [], fresh(), 0
    for size in sizes:
        total += size
        if size and total > reference.room:
            link.updates.report_output(reference, total)
            expected.append(total)
        progress.pass_on(DetailedOutput(size, range(size)))
    progress.end()
    assert link.reported == expected
    assert link.prefills == (total > 0)
    assert link.freed == [None]
    assert len(received.tokens) == progress.output_tokens == total
    assert registry.get_sample_value("kvrouter_frontend_output_tokens_total", {"model": "llama"}) == total
    between = registry.get_sample_value("kvrouter_frontend_inter_token_seconds_count", {"model": "llama"})
    assert between == total - next(filter(None, sizes), 0), "the first piece has no output before it"


@pytest.mark.parametrize("finish_reason", [FinishReason.FINISH_REASON_UNSPECIFIED, FinishReason.FINISH_REASON_LENGTH])
def test_a_first_piece_that_is_the_last_is_reported_by_the_free_alone(finish_reason: FinishReason) -> None:
    booking = LiveBooking.of(BookingKey(request_id="r"), SelectWorkerResponse(), b"", 16, 16)
    link, metrics = Link(), MetricsByModel(CollectorRegistry()).of("llama")
    progress = Progress(booking, cast(SchedulerLink, link), Received(), metrics, since_ns=0)
    progress.pass_on(DetailedOutput(1, [1], finish_reason=finish_reason))
    progress.end()
    ends = finish_reason == FinishReason.FINISH_REASON_LENGTH
    assert (link.prefills, link.reported) == ((0, []) if ends else (1, [1]))
    assert link.prefilled_by_free == [ends]


@pytest.mark.parametrize(
    ("finish_reason", "output_tokens"),
    [
        (FinishReason.FINISH_REASON_UNSPECIFIED, None),
        (FinishReason.FINISH_REASON_STOP, 5),
        (FinishReason.FINISH_REASON_LENGTH, 5),
        (FinishReason.FINISH_REASON_ABORT, None),
        (FinishReason.FINISH_REASON_ERROR, None),
    ],
)
def test_the_free_says_what_was_loaded_and_the_length_of_a_whole_output(
    finish_reason: FinishReason, output_tokens: int | None
) -> None:
    booking = LiveBooking.of(BookingKey(request_id="r"), SelectWorkerResponse(), b"", 16, 16)
    link, metrics = Link(), MetricsByModel(CollectorRegistry()).of("llama")
    progress = Progress(booking, cast(SchedulerLink, link), Received(), metrics, since_ns=0)
    lower = LowerTiers(host=16)
    progress.pass_on(DetailedOutput(1, [1], cached_tokens=16, lower_cached_tokens=lower))
    progress.pass_on(DetailedOutput(4, [1, 2, 3, 4], finish_reason=finish_reason))
    progress.end()
    assert link.further == {"lower_cached_tokens": lower, "output_tokens": output_tokens}


def test_a_hand_over_is_reported_even_if_the_first_piece_is_the_last() -> None:
    booking = LiveBooking.of(BookingKey(request_id="r"), SelectWorkerResponse(), b"", 16, 16)
    link, metrics = Handover(), MetricsByModel(CollectorRegistry()).of("llama")
    progress = Progress(booking, cast(SchedulerLink, link), Received(), metrics, since_ns=0, handover_us=lambda: 7)
    progress.pass_on(DetailedOutput(1, [1], finish_reason=FinishReason.FINISH_REASON_LENGTH))
    progress.end()
    assert (link.handovers, link.prefilled_by_free) == ([7], [False])
