"""Runs one workload through Dynamo's offline simulation and prints JSON. Runs in Dynamo's own environment.

python peer.py TRACE --piece-tokens 512 --loads 2,4 --weights 1,4,64 [--workers 16] [--repeats 1] [--queue]
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from dynamo._core import KvRouterConfig, run_mocker_trace_replay

parser = argparse.ArgumentParser()
parser.add_argument("trace")
parser.add_argument("--piece-tokens", type=int, default=512)
parser.add_argument("--workers", type=int, default=16)
parser.add_argument("--blocks", type=int, default=16384)
parser.add_argument("--loads", default="2,4,5,6")
parser.add_argument("--weights", default="1,4,64")
parser.add_argument("--repeats", type=int, default=1)
parser.add_argument("--queue", action="store_true", help="also its optional queue (wspt, threshold 1, weight 1)")
options = parser.parse_args()

rows = []


def run(load: float, policy: str, mode: str, config: KvRouterConfig | None = None) -> None:
    routing = {} if config is None else {"router_config": config}
    for _ in range(1 if config is None else options.repeats):
        started = time.perf_counter()
        summary = run_mocker_trace_replay(
            [options.trace],
            num_workers=options.workers,
            router_mode=mode,
            arrival_speedup_ratio=load,
            trace_block_size=options.piece_tokens,
            sla_ttft_ms=2000,
            sla_itl_ms=50,
            extra_engine_args={"engine": {"num_gpu_blocks": options.blocks, "block_size": 16}},
            **routing,
        ).summary
        rows.append(
            {
                "load": load,
                "policy": policy,
                "reuse": summary["first_admission_prefix_cache_reused_ratio"],
                "p50": summary["median_ttft_ms"],
                "p90": summary["p90_ttft_ms"],
                "p99": summary["p99_ttft_ms"],
                "mean": summary["mean_ttft_ms"],
                "within_slo": summary["goodput_completed_requests"],
                "completed": summary["completed_requests"],
                "wall_s": time.perf_counter() - started,
            }
        )
        print(f"peer: x{load:g} {policy} {rows[-1]['wall_s']:.1f} s", file=sys.stderr, flush=True)


for load in map(float, options.loads.split(",")):
    run(load, "round-robin", "round_robin")
    for weight in map(float, options.weights.split(",")):
        run(load, f"kv:{weight:g}", "kv_router", KvRouterConfig(overlap_score_weight=weight))
    if options.queue:
        queue = KvRouterConfig(overlap_score_weight=1.0, router_queue_threshold=1.0, router_queue_policy="wspt")
        run(load, "kv:1 + its queue", "kv_router", queue)
json.dump(rows, sys.stdout)
