"""Runs Dynamo's offline simulation of the splits of bench/disaggregation.md: its mock engines, its router.

    $PEERS_WORK/venv/bin/python bench/quality/dynamo_pools.py [REQUESTS]

Runs in an environment with ai-dynamo-runtime 1.6.1, without kvrouter. Both simulations have the same time model of an
engine, 16,384 blocks of 16 tokens, and the same link. Prompts of which the decode engine lacks 2,048 tokens or more are
computed by prefill engines. For each split the better one of two weights of Dynamo's router is printed, by the share of
requests within the objectives.
"""

from __future__ import annotations

import gzip
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

from dynamo._core import KvRouterConfig, run_mocker_trace_replay

TRACE = Path(__file__).parents[2] / "devtools/src/kvrouter/devtools/traces/data/conversation_trace.jsonl.gz"
ENGINE = {"num_gpu_blocks": 16_384, "block_size": 16, "kv_transfer_bandwidth": 25.0, "kv_bytes_per_token": 131_072}
WORKERS = 16
LOADS = (2.0, 5.0)
PREFILL = (0, 2, 4, 6, 8)
WEIGHTS = (1.0, 64.0)


def run(trace: str, load: float, prefill: int, weight: float) -> dict[str, Any]:
    """Returns the summary of a run."""
    router: dict[str, Any] = {"overlap_score_weight": weight}
    if prefill:
        roles = {
            "prefill_engine_args": {"engine": ENGINE | {"worker_type": "prefill"}},
            "decode_engine_args": {"engine": ENGINE | {"worker_type": "decode"}},
            "num_prefill_workers": prefill,
            "num_decode_workers": WORKERS - prefill,
        }
        router |= {"conditional_disagg_enabled": True, "conditional_disagg_eff_isl_threshold": 2048}
    else:
        roles = {"extra_engine_args": {"engine": ENGINE}, "num_workers": WORKERS}
    return run_mocker_trace_replay(
        [trace],
        router_mode="kv_router",
        router_config=KvRouterConfig(**router),
        arrival_speedup_ratio=load,
        trace_block_size=512,
        sla_ttft_ms=2000,
        sla_itl_ms=50,
        **roles,
    ).summary


def main(requests: int = 600) -> None:
    """Prints the rows."""
    with tempfile.NamedTemporaryFile("wt", suffix=".jsonl") as trace, gzip.open(TRACE, "rt") as lines:
        trace.writelines(islice(lines, requests))
        trace.flush()
        for load in LOADS:
            for prefill in PREFILL:
                runs = {weight: run(trace.name, load, prefill, weight) for weight in WEIGHTS}
                weight, best = max(runs.items(), key=lambda each: each[1]["goodput_completed_requests"])
                fleet = f"{prefill} + {WORKERS - prefill}" if prefill else f"{WORKERS} undivided"
                print(
                    f"| trace {load:g} | {fleet} | {weight:g} |"
                    f" {best['median_ttft_ms']:,.0f} | {best['p99_ttft_ms']:,.0f} | {best['mean_ttft_ms']:,.0f} |"
                    f" {best['median_itl_ms']:.1f} | {best['p99_itl_ms']:.1f} |"
                    f" {best['goodput_completed_requests'] / best['completed_requests']:.1%} |",
                    flush=True,
                )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
