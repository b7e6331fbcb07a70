"""The engine in Rust against its oracle: outputs, events, times, loads and tables are equal after every action."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from kvrouter.mocker.engine.config import EngineConfig, TierConfig
from kvrouter.mocker.engine.reference import Engine
from kvrouter.mocker.engine.time_model import TimeModel
from kvrouter.mocker.engine.types import RequestRefused

from .engine_harness import request
from .test_invariants import SCOPES, prompts

native_engine = pytest.importorskip("kvrouter.mocker.engine.native", reason="the engine in Rust is not built")
SharedStorage = native_engine._native.SharedStorage


def fitting(max_model_tokens: int | None, **settings: Any) -> EngineConfig:
    """A configuration whose longest sequence fits its cache."""
    capacity = settings["num_blocks"] * settings["block_size"]
    longest = None if max_model_tokens is None else min(max_model_tokens, capacity)
    return EngineConfig(max_model_tokens=longest, **settings)


configs = st.builds(
    fitting,
    num_blocks=st.integers(2, 24),
    block_size=st.integers(1, 4),
    max_sequences=st.integers(1, 5),
    max_batched_tokens=st.integers(5, 20),
    max_waiting=st.integers(1, 8),
    mean_output_tokens=st.sampled_from([0.0, 0.0, 4.0]),
    vocabulary_size=st.sampled_from([2, 3, 1 << 32]),
    hash_seed=st.integers(0, (1 << 64) - 1),
    speed=st.sampled_from([1.0, 0.3, 7.0]),
    prefix_caching=st.sampled_from([True, True, True, False]),
    max_model_tokens=st.sampled_from([None, None, 2, 7, 15]),
    time_model=st.sampled_from([TimeModel(), TimeModel(1e-3, 0.0, 0.0, -9.0, 3.0, 0.0, 0.5)]),
    host=st.sampled_from([TierConfig(), TierConfig(3), TierConfig(40, 1e-3, 0.7)]),
    shared=st.sampled_from([TierConfig(), TierConfig(5, 1e-4, 9.0)]),
)
ends = st.fixed_dictionaries(
    {
        "stop_token_ids": st.sampled_from([frozenset(), frozenset({1})]),
        "min_tokens": st.integers(0, 4),
        "ignore_eos": st.booleans(),
        "output": st.sampled_from([(), (), (7, 8, 9, 7, 8), (5,)]),
    }
)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), prompts, st.integers(1, 12), st.sampled_from(SCOPES), ends),
        st.tuples(st.just("begin")),
        st.tuples(st.just("end")),
        st.tuples(st.just("step")),
        st.tuples(st.just("step")),
        st.tuples(st.just("step")),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("clear")),
    ),
    max_size=80,
)


class Pair:
    """Both engines, given the same."""

    def __init__(self, config: EngineConfig) -> None:
        self.oracle, self.native = Engine(config), native_engine.NativeEngine(config, SharedStorage())
        self.now = 0.0

    def both(self, method: str, *arguments: object) -> object:
        outcomes = []
        for engine in (self.oracle, self.native):
            try:
                outcomes.append(getattr(engine, method)(*arguments))
            except (RequestRefused, RuntimeError) as error:
                outcomes.append((type(error), str(error)))
        assert outcomes[0] == outcomes[1], method
        return outcomes[0]


@settings(max_examples=500)
@given(configs, actions)
def test_both_do_the_same(config: EngineConfig, script: list[tuple]) -> None:  # type: ignore[type-arg]
    pair = Pair(config)
    for number, (action, *details) in enumerate(script):
        if action == "submit":
            prompt, max_tokens, scope, end = details
            pair.both("submit", request(str(number), prompt, max_tokens, scope, **end), pair.now)
        elif action == "abort":
            pair.both("abort", str(details[0]))
        elif action == "clear":
            pair.both("clear_cache")
        if action in ("begin", "step"):
            step = pair.both("begin_step", pair.now)
            pair.now = getattr(step, "ends_at", pair.now)
        if action in ("end", "step"):
            pair.both("end_step", pair.now)
        pair.both("load")
        pair.both("cached_blocks")


def test_long_runs_are_equal_to_the_last_bit_of_the_clock() -> None:
    config = EngineConfig(num_blocks=64, block_size=4, max_batched_tokens=64, max_sequences=16)
    pair = Pair(config)
    arrivals = {3 * at: [at % 3, at % 5, at % 2] * (5 + at % 11) for at in range(60)}
    for turn in range(600):
        if turn in arrivals:
            pair.both("submit", request(str(turn), arrivals[turn], 1 + turn % 40), pair.now)
        step = pair.both("begin_step", pair.now)
        if step is not None:
            pair.now = getattr(step, "ends_at", pair.now)
            pair.both("end_step", pair.now)
    pair.both("cached_blocks")
    assert pair.oracle.load().cached_blocks > 0
    assert pair.now > 1
