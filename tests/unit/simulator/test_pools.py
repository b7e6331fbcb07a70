"""Runs with prefill and decode pools."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvrouter.mocker.engine import implementation as engine_choice
from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.runtime.kv_transfer import KvTransfer
from kvrouter.scheduler.request.options import RoutingOptions, Thresholds
from kvrouter.scheduler.request.remote_prefill import RemotePrefillOptions
from kvrouter.simulator.engines import fleet
from kvrouter.simulator.results.outcome import Outcome, run_statistics
from kvrouter.simulator.simulation import Setting, simulate
from kvrouter.simulator.workloads.workload import Prompts, Request, Workload

ENGINES = [EngineConfig(num_blocks=600, hash_seed=number, max_sequences=64) for number in range(5)]
DECODE = 3
LINK = KvTransfer(bytes_per_token=100_000, gigabytes_per_second=10.0, latency_ms=7.0)
LONG, SHORT = 1280, 64
NO_THRESHOLDS = Thresholds()
WORKLOAD = Workload(
    "long and short prompts",
    [Request(0.11 * n, SHORT if n % 3 else LONG, 20, tuple(range(100 * n, 100 * n + 20))) for n in range(60)],
    64,
)


def run(
    min_tokens: int = 512,
    transfer: KvTransfer = LINK,
    *,
    mode: str = "forecast",
    load: float = 1.0,
    blocks: int = 600,
    thresholds: Thresholds = NO_THRESHOLDS,
) -> Outcome:
    engines = [replace(config, num_blocks=blocks) for config in ENGINES]
    options = RoutingOptions(
        mode, thresholds=thresholds, remote_prefill=RemotePrefillOptions(min_tokens, 100.0, transfer)
    )
    setting = Setting(engines[:DECODE], prefill_engines=engines[DECODE:], options=options)
    return simulate(WORKLOAD.faster(load), setting, Prompts(WORKLOAD, 16))


@pytest.mark.parametrize("mode", ["forecast", "kv", "round-robin"])
def test_prefill_engines_compute_long_prompts_and_decode_engines_short_ones(mode: str) -> None:
    for served in run(mode=mode).served:
        assert served.engine < DECODE
        if served.prompt_tokens == LONG:
            assert served.prefill_engine >= DECODE
            assert served.first_at > served.sent_at + LINK.ms(LONG) / 1e3
        else:
            assert served.prefill_engine == -1


def test_a_link_that_is_slower_than_computing_leaves_the_prefill_engines_idle() -> None:
    outcome = run(transfer=replace(LINK, gigabytes_per_second=0.1))
    assert run_statistics(outcome, slo_ttft_s=1, slo_itl_s=1).prefilled_remotely == 0
    assert outcome.totals.busy_seconds[DECODE:] == [0.0, 0.0]


def test_prompts_that_are_transferred_do_not_interrupt_output() -> None:
    local, remote = (run(min_tokens, load=4.0, blocks=10_000) for min_tokens in (1 << 20, 0))
    # A step with a long prompt takes 16.5 + 1280 * 0.01518 ms besides decoding.
    assert max(remote.gaps_s) < 0.0359 < max(local.gaps_s)


def test_a_decode_engine_computes_the_prompt_if_all_prefill_engines_are_busy() -> None:
    outcome = run(load=20.0, blocks=10_000, thresholds=Thresholds(prefill_tokens=4 * SHORT))
    summed = run_statistics(outcome, slo_ttft_s=10, slo_itl_s=1)
    long_prompts = sum(request.prompt_tokens == LONG for request in WORKLOAD.requests)
    assert 0 < summed.prefilled_remotely < long_prompts
    assert summed.refused == 0


def test_requests_are_refused_if_all_engines_are_busy() -> None:
    outcome = run(load=20.0, thresholds=Thresholds(decode_blocks=0.3))
    summed = run_statistics(outcome, slo_ttft_s=10, slo_itl_s=1)
    assert 0 < summed.refused < len(WORKLOAD.requests)
    assert summed.requests + summed.refused == len(WORKLOAD.requests)
    assert summed.good_share == pytest.approx(summed.within_slo / len(WORKLOAD.requests))


def test_what_a_prefill_engine_has_in_its_cache_is_not_computed_again() -> None:
    requests = [Request(2.0 * n, LONG, 4, tuple(range(20))) for n in range(3)]
    workload = Workload("w", requests, 64)
    options = RoutingOptions(remote_prefill=RemotePrefillOptions(0, 100.0, LINK))
    setting = Setting(ENGINES[:1], prefill_engines=ENGINES[1:3], options=options)
    first, second, third = simulate(workload, setting, Prompts(workload, 16)).served
    assert first.prefill_engine > 0
    assert (second.prefill_engine, third.prefill_engine) == (-1, -1), "the decode engine holds the prompt"
    assert second.cached_tokens == third.cached_tokens == LONG - 16
    halves = replace(workload, requests=[requests[0], Request(2.0, LONG, 4, (*range(10), *range(50, 60)))])
    again = simulate(halves, replace(setting, options=replace(options, mode="round-robin")), Prompts(halves, 16))
    assert again.served[1].prefill_engine != again.served[0].prefill_engine, "round-robin takes the other one"
    by_cache = simulate(halves, setting, Prompts(halves, 16)).served[1]
    assert by_cache.cached_tokens == LONG // 2


@pytest.mark.skipif(engine_choice.IMPLEMENTATION != "native", reason="the engine in Rust is not built")
def test_the_plain_engines_give_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    native = run()
    monkeypatch.setattr(fleet, "IMPLEMENTATION", "reference")
    assert run() == native


@pytest.mark.skipif(engine_choice.IMPLEMENTATION != "native", reason="the engine in Rust is not built")
def test_the_plain_engines_preempt_received_prompts_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    small = [replace(config, num_blocks=100) for config in ENGINES]
    # Output of 30 blocks: two prompts of 20 blocks start together and do not end together.
    requests = [Request(0.01 * n, 320, 640, tuple(range(100 * n, 100 * n + 5))) for n in range(12)]
    workload = Workload("w", requests, 64)
    options = RoutingOptions("round-robin", remote_prefill=RemotePrefillOptions(0, 100.0, LINK))
    setting = Setting(small[:DECODE], prefill_engines=small[DECODE:], options=options)
    native = simulate(workload, setting, Prompts(workload, 16))
    assert native.totals.preemptions
    monkeypatch.setattr(fleet, "IMPLEMENTATION", "reference")
    assert simulate(workload, setting, Prompts(workload, 16)) == native
