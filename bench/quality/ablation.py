"""What each part of mode forecast is worth: the same runs without it, one part at a time.

    .venv/bin/python bench/quality/ablation.py [--on prompts@3#1,trace@5] [--without batch,held]

A run is a workload of ``tables.py`` at a load, and perhaps with a seed. A line for each: mean time to first token, its
p99, and the share of requests within their objectives.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np
from kvrouter.scheduler.load import latency_calibration
from kvrouter.scheduler.load.booked_load import Accounting
from kvrouter.scheduler.policies.catalogue import POLICIES
from kvrouter.scheduler.policies.forecast import policy as forecast
from kvrouter.scheduler.policies.interface import Amounts, Choice, SchedulingContext, Wait
from kvrouter.scheduler.queue import request_queue
from kvrouter.simulator.routing import router
from kvrouter.simulator.workloads.workload import Prompts
from tables import CONDITIONS, SHARED_TRACE, Cell, measure, workload_of

Changed = Callable[[SchedulingContext], SchedulingContext]
MS_PER_TOKEN = 0.0167
"""A prompt of 8,192 tokens takes as long by this as by the time model."""


def constant(module: Any, name: str, value: object) -> Any:
    """One value of a module is another."""
    return mock.patch.object(module, name, value)


@contextmanager
def context(change: Changed) -> Iterator[None]:
    """The policy sees changed facts."""
    rule = type(POLICIES["forecast"])
    decide = rule.decide

    def changed(self: Any, context: SchedulingContext, rng: Random) -> Choice | Wait:
        return decide(self, change(context), rng)

    with mock.patch.object(rule, "decide", changed):
        yield


@contextmanager
def no_batch() -> Iterator[None]:
    """Others in the step do not count."""
    weigh = forecast.weigh

    def without(context: SchedulingContext, shares: Amounts) -> forecast.Weighed:
        weighed = weigh(context, shares)
        return weighed._replace(batch=np.zeros_like(weighed.batch))

    with constant(forecast, "weigh", without):
        yield


def no_progress(given: SchedulingContext) -> SchedulingContext:
    """Nothing is known of the prompt under way."""
    zeros = np.zeros_like(given.head_prefill_seconds)
    return replace(given, head_prefill_tokens=np.zeros_like(given.head_prefill_tokens), head_prefill_seconds=zeros)


def in_proportion(tokens: Any, budget: Any, decode: Any) -> Any:  # noqa: ARG001 - stands in for prefill_ms
    """Prefill in proportion to tokens, whatever else a step does."""
    return tokens * MS_PER_TOKEN


PARTS: Mapping[str, Callable[[], Any]] = {
    "shortage": lambda: constant(forecast, "SHORTAGE_MS", 0.0),
    "queued": lambda: constant(router, "RequestQueue", partial(request_queue.RequestQueue, 0)),
    "b": lambda: constant(forecast, "BASE", 0.0),
    "crowd": lambda: constant(forecast, "CROWD", 0.0),
    "batch": no_batch,
    "progress": lambda: context(no_progress),
    "decode": lambda: constant(forecast, "decode_ms", np.zeros_like),
    "steps": lambda: constant(forecast, "prefill_ms", in_proportion),
    "latency-calibration": lambda: constant(latency_calibration, "STEP", 0.0),
    "distinct-blocks": lambda: constant(router, "Accounting", partial(Accounting, assume_kv_reuse=False)),
    "least-first": lambda: constant(request_queue, "AGING", 1e9),
}
"""What is taken away: for its time, the code is another."""


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", default="prompts@3#0,prompts@3#1,prompts@4#0,chat@5#0,chat@7#0,documents@2#0")
    parser.add_argument("--without", default=",".join(PARTS), help="parts")
    parser.add_argument("--condition", default="plain", choices=CONDITIONS)
    parser.add_argument("--trace", type=Path, default=SHARED_TRACE)
    options = parser.parse_args()
    for spec in options.on.split(","):
        run(spec, options.without.split(","), options.condition, options.trace)
    return 0


def run(spec: str, parts: Sequence[str], condition: str, trace: Path) -> None:
    """One workload with all, then without each."""
    traffic, _, at = spec.partition("@")
    load, _, seed = at.partition("#")
    cell = Cell(traffic, int(seed or 0), condition, float(load), "forecast")
    workload = workload_of(traffic, cell.seed, trace)
    prompts = Prompts(workload, 16)
    for part in ("nothing", *filter(None, parts)):
        with PARTS[part]() if part in PARTS else nullcontext():
            row = measure(cell, workload, prompts)
        run_statistics = f"mean {row['mean']:9,.1f}  p99 {row['p99']:9,.0f}  within SLO {row['slo']:.1%}"
        print(f"{spec:14} without {part:18} {run_statistics}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
