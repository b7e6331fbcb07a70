"""The fleet in Rust against the plain one: notices, cache events, gaps and totals are equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import Phase, example, find, given, settings, strategies as st
from kvrouter.mocker.engine.config import EngineConfig, TierConfig
from kvrouter.mocker.engine.implementation import IMPLEMENTATION
from kvrouter.mocker.engine.time_model import TimeModel
from kvrouter.mocker.engine.types import pack_tokens
from kvrouter.simulator.engines.fleet import EngineLoad, Fleet, NativeFleet, Notice, RawEvent, ReferenceFleet, Totals

CONFIGS = [
    EngineConfig(num_blocks=12, block_size=4, max_batched_tokens=16, max_sequences=4, hash_seed=number, speed=speed)
    for number, speed in enumerate((1.0, 0.5, 1.0))
]
# Few blocks and few tokens: hits, evictions, truncated last blocks, chunked prefills and preemptions are common.
fleets = st.builds(
    lambda block_size, blocks, budget, sequences, speeds, model, host, shared: [
        EngineConfig(
            num_blocks=blocks,
            block_size=block_size,
            max_batched_tokens=budget,
            max_sequences=sequences,
            hash_seed=number,
            speed=speed,
            time_model=model,
            host=host,
            shared=shared,
        )
        for number, speed in enumerate(speeds)
    ],
    block_size=st.integers(1, 5),
    blocks=st.integers(4, 16),
    budget=st.integers(5, 24),
    sequences=st.integers(1, 5),
    speeds=st.lists(st.sampled_from([1.0, 0.5, 3.0]), min_size=1, max_size=3),
    model=st.sampled_from([TimeModel(), TimeModel(0.0, 0.0, 10.0, 0.0, 0.0, 10.0), TimeModel(decode_floor_ms=40.0)]),
    host=st.sampled_from([TierConfig(), TierConfig(6, 1e-3), TierConfig(40)]),
    shared=st.sampled_from([TierConfig(), TierConfig(8, 1e-4, 3.0), TierConfig(60, 1e-4, 3.0)]),
)
# Steps of 10 ms meet arrivals at multiples of 10 ms: then all is at equal times.
pauses = st.one_of(st.just(0.0), st.sampled_from([0.01, 0.02, 0.1]), st.floats(0, 0.2))
# Random prompts seldom repeat one whose blocks left device memory: prefixes of three texts reach the lower tiers.
prompts = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=24),
    st.builds(
        lambda first, length: [*range(first, first + length)], st.sampled_from([0, 100, 200]), st.integers(8, 24)
    ),
)
scripts = st.lists(
    st.tuples(
        pauses,
        st.sampled_from(["submit", "submit", "submit", "submit", "restart"]),
        st.integers(0, 2),
        prompts,
        st.integers(1, 20),
    ),
    min_size=1,
    max_size=30,
)

# Three texts of 16 tokens fill the 8 blocks of 4 tokens, so the first one is loaded when it comes again.
REPEATED_TEXT = [(0.2, "submit", 0, [*range(first, first + 16)], 1) for first in (0, 100, 200, 0)]
HOST, SHARED = (
    [
        EngineConfig(
            num_blocks=8, block_size=4, max_batched_tokens=24, max_sequences=4, hash_seed=0, host=host, shared=shared
        )
    ]
    for host, shared in ((TierConfig(40), TierConfig()), (TierConfig(), TierConfig(60, 1e-4, 3.0)))
)


def run(fleet: Fleet, configs: list[EngineConfig], script: list[tuple[float, str, int, list[int], int]]) -> Seen:
    seen = Seen()
    at = 0.0
    for number, (pause, action, engine, prompt, max_tokens) in enumerate(script):
        at += pause
        while fleet.now < at:
            seen.notices += fleet.advance(at)
            seen.events += fleet.take_events()
            seen.loads += [fleet.load(place) for place in range(len(configs))]
        place = engine % len(configs)
        if action == "restart":
            fleet.restart(place)
        elif len(prompt) + max_tokens <= configs[place].length_limit:
            fleet.submit(place, number, pack_tokens(prompt), max_tokens)
    while True:
        last = fleet.advance(fleet.now + 1e6)
        seen.events += fleet.take_events()
        if not last:
            break
        seen.notices += last
    seen.loads += [fleet.load(place) for place in range(len(configs))]
    seen.gaps, seen.totals = list(fleet.sorted_gaps()), fleet.totals()
    return seen


@dataclass
class Seen:
    """All that a fleet tells."""

    notices: list[Notice] = field(default_factory=list)
    events: list[tuple[float, int, RawEvent]] = field(default_factory=list)
    loads: list[EngineLoad] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    totals: Totals | None = None


@pytest.mark.skipif(IMPLEMENTATION != "native", reason="the engine in Rust is not built")
@settings(max_examples=300)
@given(fleets, scripts)
@example(HOST, REPEATED_TEXT)
@example(SHARED, REPEATED_TEXT)
def test_both_do_the_same(configs: list[EngineConfig], script: list[tuple[float, str, int, list[int], int]]) -> None:
    native = run(NativeFleet(configs, record_events=True), configs, script)
    assert native == run(ReferenceFleet(configs, record_events=True), configs, script)


def preempts(seen: Seen) -> bool:
    return seen.totals is not None and seen.totals.preemptions > 0


def evicts(seen: Seen) -> bool:
    return any(len(event) == 2 for _, _, event in seen.events)


def reuses(seen: Seen) -> bool:
    return any(notice.cached_tokens for notice in seen.notices)


def loads_from_host_memory(seen: Seen) -> bool:
    return any(each.host_tokens for each in seen.notices)


def loads_from_shared_storage(seen: Seen) -> bool:
    return any(each.shared_tokens for each in seen.notices)


def coincides(seen: Seen) -> bool:
    """Requests of two engines start or end at the same moment."""
    return any(one.at == other.at and one.engine != other.engine for one, other in pairwise(seen.notices))


@pytest.mark.parametrize(("what", "configs"), [(loads_from_host_memory, HOST), (loads_from_shared_storage, SHARED)])
def test_a_repeated_text_is_loaded_from_a_lower_tier(what: Callable[[Seen], bool], configs: list[EngineConfig]) -> None:
    assert what(run(ReferenceFleet(configs, record_events=True), configs, REPEATED_TEXT))


@pytest.mark.parametrize("what", [preempts, evicts, reuses, coincides])
def test_the_scripts_reach_what_matters(what: Callable[[Seen], bool]) -> None:
    find(
        st.tuples(fleets, scripts),
        lambda drawn: what(run(ReferenceFleet(drawn[0], record_events=True), *drawn)),
        settings=settings(max_examples=2000, phases=[Phase.generate], database=None),
    )


def test_it_stops_when_a_request_starts_or_ends_before_the_next_step() -> None:
    fleet = ReferenceFleet(CONFIGS, record_events=False)
    fleet.submit(0, 7, pack_tokens([1] * 10), 2)
    (first,) = fleet.advance(10.0)
    assert (first.number, first.generated, first.finished) == (7, 1, False)
    assert fleet.now == first.at < 10.0
    (last,) = fleet.advance(10.0)
    assert (last.generated, last.finished) == (2, True)
    assert fleet.advance(10.0) == []
    assert fleet.now == 10.0


def test_blocks_that_output_begins_are_reported_without_a_stop() -> None:
    fleet = ReferenceFleet(CONFIGS, record_events=False)
    fleet.submit(0, 7, pack_tokens([1] * 4), 10)
    announcement = [notice.generated for _ in range(2) for notice in fleet.advance(10.0)]
    assert announcement == [1, 5, 9, 10]
