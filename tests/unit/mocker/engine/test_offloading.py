"""Tiers below the device: what is copied to them, evicted from them, loaded from them, and how long that takes."""

from __future__ import annotations

from collections.abc import Iterable

from kvrouter.mocker.engine.config import EngineConfig, TierConfig
from kvrouter.mocker.engine.offloading import Parts
from kvrouter.mocker.engine.reference import Engine
from kvrouter.mocker.engine.types import CacheEvent, CacheTier, Removed, Stored

from .engine_harness import Drive, counted, engine

GB_S = 1e-9 * 4 * 131_072
"""Bandwidth at which a block of 4 tokens takes a second."""
PROMPT = range(17)
OTHERS = range(100, 137)


def of_tier(events: Iterable[CacheEvent], tier: CacheTier) -> list[CacheEvent]:
    return [each for each in events if isinstance(each, Stored | Removed) and each.tier == tier]


def test_an_evicted_prompt_is_loaded_from_host_memory() -> None:
    drive = Drive(engine(host=TierConfig(40, GB_S, latency_ms=500)))
    drive.run("a", PROMPT)
    drive.run("b", OTHERS)
    [output] = drive.run("c", PROMPT)
    assert (output.cached_tokens, output.host_tokens, output.shared_tokens) == (16, 16, 0)
    assert drive.steps[-1].duration == 4.5, "four blocks and the latency, far beyond the computation"
    assert drive.steps[-1].prefill_tokens == 1
    stored = [each for each in drive.steps[-1].events if isinstance(each, Stored)]
    assert stored == [drive.steps[0].events[0]], "the device has them again, and host memory still has them"
    host = counted(of_tier(drive.events, CacheTier.HOST))
    assert set(host.values()) == {1}
    assert len(host) == 4 + 9


def test_a_load_within_the_computation_costs_no_time() -> None:
    drive = Drive(engine(host=TierConfig(40)))
    drive.run("a", PROMPT)
    drive.run("b", OTHERS)
    [output] = drive.run("c", PROMPT)
    assert output.host_tokens == 16
    assert drive.steps[-1].duration == drive.engine.config.time_model.step_seconds(1, 0, 40)


def test_host_memory_evicts_what_was_used_longest_ago_there_and_the_last_blocks_first() -> None:
    drive = Drive(engine(host=TierConfig(9)))
    drive.run("a", PROMPT)
    drive.run("b", range(50, 67))
    drive.run("a2", [*PROMPT, 90, 91, 92])  # uses four blocks and adds one
    drive.run("b2", range(200, 205))
    removed = [each for each in of_tier(drive.events, CacheTier.HOST) if isinstance(each, Removed)]
    of_b = [each for each in of_tier(drive.events, CacheTier.HOST) if isinstance(each, Stored)][1]
    assert [[*each.engine_hashes] for each in removed] == [[of_b.engine_hashes[-1]]]


def test_engines_read_each_others_shared_blocks() -> None:
    config = EngineConfig(10, 4, max_batched_tokens=16, max_sequences=8, shared=TierConfig(20))
    parts: Parts = []
    first, second = Drive(Engine(config, parts)), Drive(Engine(config, parts))
    first.run("a", PROMPT)
    [output] = second.run("b", PROMPT)
    assert (output.cached_tokens, output.host_tokens, output.shared_tokens) == (16, 0, 16)
    assert not of_tier(second.events, CacheTier.SHARED), "the other engine has stored them"
    first.engine.leave()
    third = Drive(Engine(config, parts))
    [output] = third.run("c", PROMPT)
    assert output.shared_tokens == 0


def test_clearing_the_cache_empties_the_tiers() -> None:
    drive = Drive(engine(host=TierConfig(40), shared=TierConfig(40)))
    drive.run("a", PROMPT)
    drive.engine.clear_cache()
    drive.drain()
    assert drive.run("b", PROMPT)[0].cached_tokens == 0
