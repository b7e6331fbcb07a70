"""The fleet in Rust against the plain one: notices, cache events, gaps and totals are equal."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvrouter.mocker.engine_choice import IMPLEMENTATION
from kvrouter.mocker.engine_config import EngineConfig
from kvrouter.mocker.engine_types import pack_tokens
from kvrouter.simulator.fleet import Fleet, NativeFleet, Notice, ReferenceFleet

CONFIGS = [
    EngineConfig(num_blocks=12, block_size=4, max_batched_tokens=16, max_sequences=4, hash_seed=number, speed=speed)
    for number, speed in enumerate((1.0, 0.5, 1.0))
]
arrivals = st.lists(
    st.tuples(
        st.floats(0, 0.2),
        st.integers(0, len(CONFIGS) - 1),
        st.lists(st.integers(0, 1), min_size=1, max_size=24),
        st.integers(1, 12),
        st.booleans(),
    ),
    max_size=25,
)


def run(fleet: Fleet, script: list[tuple[float, int, list[int], int, bool]]) -> tuple[object, ...]:
    notices: list[Notice] = []
    events = []
    at = 0.0
    for number, (pause, engine, prompt, max_tokens, restart) in enumerate(script):
        at += pause
        while fleet.now < at:
            notices += fleet.advance(at)
            events += fleet.take_events()
        fleet.submit(engine, number, pack_tokens(prompt), max_tokens)
        if restart and number % 5 == 4:
            fleet.restart(engine)
    while True:
        last = fleet.advance(fleet.now + 1e6)
        events += fleet.take_events()
        if not last:
            break
        notices += last
    loads = [fleet.load(number) for number in range(len(CONFIGS))]
    return notices, events, loads, list(fleet.sorted_gaps()), fleet.totals()


@pytest.mark.skipif(IMPLEMENTATION != "native", reason="the engine in Rust is not built")
@settings(max_examples=150, deadline=None)
@given(arrivals)
def test_both_do_the_same(script: list[tuple[float, int, list[int], int, bool]]) -> None:
    native = run(NativeFleet(CONFIGS, record_events=True), script)
    assert native == run(ReferenceFleet(CONFIGS, record_events=True), script)


def test_it_stops_where_a_request_starts_or_ends_before_the_next_step_begins() -> None:
    fleet = ReferenceFleet(CONFIGS, record_events=False)
    fleet.submit(0, 7, pack_tokens([1] * 10), 2)
    (first,) = fleet.advance(10.0)
    assert (first.number, first.generated, first.finished) == (7, 1, False)
    assert fleet.now == first.at < 10.0
    (last,) = fleet.advance(10.0)
    assert (last.generated, last.finished) == (2, True)
    assert fleet.advance(10.0) == []
    assert fleet.now == 10.0


def test_blocks_that_output_begins_are_told_without_a_stop() -> None:
    fleet = ReferenceFleet(CONFIGS, record_events=False)
    fleet.submit(0, 7, pack_tokens([1] * 4), 10)
    told = [notice.generated for _ in range(2) for notice in fleet.advance(10.0)]
    assert told == [1, 5, 9, 10]
