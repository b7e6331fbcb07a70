"""The same requests through the real system and through the simulator: policies rank alike, with like figures.

Seven documents are asked about in turn, four engines hold two each: round-robin never finds one, the better policies
keep each where it is. Times are those of the engines' clock, and are only ranked: what a busy machine adds to all
leaves the ranking as it is.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import cast

import pytest
from kvrouter.devtools.replay.frontend_target import FrontendTarget, ReplayOptions
from kvrouter.devtools.replay.open_loop import replay
from kvrouter.devtools.replay.pacing import TimeScale
from kvrouter.devtools.replay.records import RequestRecord
from kvrouter.devtools.replay.statistics import hit_rate
from kvrouter.devtools.system.stack import Stack, StackOptions, running_stack
from kvrouter.devtools.traces.reader import PIECE_TOKENS, TraceRequest
from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.runtime.contracts import Frontend
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.scheduler.request.options import RoutingOptions
from kvrouter.simulator.results.outcome import RunStatistics, run_statistics
from kvrouter.simulator.simulation import Setting, simulate
from kvrouter.simulator.workloads.workload import Prompts, Request, Workload
from kvrouter.v1 import frontend_pb2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

WORST_FIRST = ("round-robin", "power-of-two", "kv", "forecast")
ENGINES, BLOCKS, BLOCK_SIZE = 4, 2000, 16
DOCUMENTS, PIECES, QUESTION_TOKENS = 7, 24, 200
EVERY_MS = 1000 / 12
SEEDS = range(6)
REUSE_TOLERANCE = 0.1
"""Beside what the draws of the policies make: what arrives a little earlier or later finds another state."""


def trace(requests: int = 84) -> list[TraceRequest]:
    return [
        TraceRequest(
            number,
            number * EVERY_MS,
            PIECES * PIECE_TOKENS + QUESTION_TOKENS,
            12,
            (*range(100 * document, 100 * document + PIECES), 1000 + number),
        )
        for number, document in ((number, number % DOCUMENTS) for number in range(requests))
    ]


def simulated(mode: str, seed: int) -> RunStatistics:
    requests = [Request(r.arrival_ms / 1e3, r.input_length, r.output_length, r.pieces) for r in trace()]
    workload = Workload("documents", requests, PIECE_TOKENS)
    engines = [EngineConfig(num_blocks=BLOCKS, block_size=BLOCK_SIZE, hash_seed=number) for number in range(ENGINES)]
    setting = Setting(engines, RoutingOptions(mode), seed, event_lag_s=0.005, regret=False)
    return run_statistics(simulate(workload, setting, Prompts(workload, BLOCK_SIZE)), slo_ttft_s=2.0, slo_itl_s=0.05)


async def played(stack: Stack, mode: str) -> list[RequestRecord]:
    """By the real system. Documents are each mode's own: what is left of another's in the caches helps nobody."""
    apart = 1_000_000 * WORST_FIRST.index(mode)
    requests = [replace(request, pieces=tuple(apart + piece for piece in request.pieces)) for request in trace()]
    async with open_channel(stack.frontend) as channel:
        frontend = cast("Frontend", remote(frontend_pb2.DESCRIPTOR.services_by_name["FrontendService"], channel))
        target = FrontendTarget(frontend, ReplayOptions(model=stack.options.model, id_prefix=mode, mode=mode))
        result = await replay(target, requests, TimeScale(load=1.0, clock=stack.options.clock))
    assert [record.error_message for record in result.records if record.error is not None] == []
    return result.records


@pytest.mark.full
async def test_policies_rank_alike_and_reuse_as_much(tmp_path: Path) -> None:
    options = StackOptions(
        tmp_path, tmp_path, workers=ENGINES, blocks=BLOCKS, block_size=BLOCK_SIZE, stream_interval=64
    )
    async with running_stack(options) as stack:
        real = {mode: await played(stack, mode) for mode in WORST_FIRST}
    model = {mode: [simulated(mode, seed) for seed in SEEDS] for mode in WORST_FIRST}

    reuse = {mode: hit_rate(records) for mode, records in real.items()}
    ttft = {mode: fmean(r.ttft_ms for r in records if r.ttft_ms is not None) for mode, records in real.items()}
    model_reuse = {mode: fmean(run.reuse for run in runs) for mode, runs in model.items()}
    model_ttft = {mode: fmean(run.ttft_ms.mean for run in runs) for mode, runs in model.items()}
    said = {
        mode: f"{reuse[mode]:.1%} for {model_reuse[mode]:.1%}, {ttft[mode]:.0f} ms for {model_ttft[mode]:.0f}"
        for mode in WORST_FIRST
    }
    for more in (reuse, model_reuse):
        assert sorted(WORST_FIRST, key=more.__getitem__) == list(WORST_FIRST), said
    for less in (ttft, model_ttft):
        assert sorted(WORST_FIRST, key=less.__getitem__, reverse=True) == list(WORST_FIRST), said
    for mode, runs in model.items():
        drawn = [run.reuse for run in runs]
        assert min(drawn) - REUSE_TOLERANCE <= reuse[mode] <= max(drawn) + REUSE_TOLERANCE, (mode, said)
