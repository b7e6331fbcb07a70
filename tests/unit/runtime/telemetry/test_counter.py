"""Counters of the event loop say what those of the client library say."""

from __future__ import annotations

from hypothesis import given, strategies as st
from kvrouter.runtime.telemetry.counter import LoopCounter
from prometheus_client import CollectorRegistry, Counter, generate_latest


def _lines(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created{" not in line]


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from([0, 1, 2.5]))))
def test_it_exposes_what_a_counter_of_the_client_library_exposes(counted: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counter = LoopCounter("x", "Things.", ["model"], registry=ours)
    reference = Counter("x", "Things.", ["model"], registry=theirs)
    for model, amount in counted:
        counter.of(model).value += amount
        reference.labels(model).inc(amount)
    assert _lines(ours) == _lines(theirs)
    if counted:
        assert (ours.get_sample_value("x_created", {"model": counted[0][0]}) or 0) > 0
