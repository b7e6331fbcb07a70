"""What each part of mode forecast is worth: the same runs without it, one part at a time.

    .venv/bin/python bench/quality/ablation.py [--on prompts@3,chat@5] [--seeds 5] [--minutes 10]

Runs what the results lack, a line for each run, and prints a table of what is there; called again, it continues. Each
run is compared with the complete policy on the same workload and seed. A run depends on its key and on the code: where
that has changed, begin with --fresh.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from unittest import mock

import numpy as np
from kvrouter.core.reference import speeds
from kvrouter.scheduler.load import booked_load
from kvrouter.scheduler.load.booked_load import Accounting
from kvrouter.scheduler.policies.forecast import policy as forecast
from kvrouter.scheduler.policies.interface import Amounts, SchedulingContext
from kvrouter.scheduler.policies.loads import Loads
from kvrouter.scheduler.queue import request_queue
from kvrouter.simulator.routing import router
from matrix import CONDITIONS, ROOT, SHARED_TRACE, Cell, measure
from msgspec.structs import replace
from tables import results_by_key

Changed = Callable[[SchedulingContext], SchedulingContext]
MS_PER_TOKEN = 0.0167
"""A prompt of 8,192 tokens takes as long by this as by the time model."""

LINEAR = {
    "PREFILL_N2_MS": 0.0,
    "PREFILL_N1_MS": 0.0170,
    "DECODE_P2_MS": 0.0,
    "DECODE_P1_MS": 28.27,
    "DECODE_P0_MS": 10.03,
}
"""The time model with straight lines through its curves."""


def constant(module: Any, name: str, value: object) -> Any:
    """One value of a module is another."""
    return mock.patch.object(module, name, value)


@contextmanager
def learned(name: str, value: float) -> Iterator[None]:
    """Latency calibration has another constant. The reference of the native core learns."""
    with constant(booked_load, "LatencyCalibration", speeds.LatencyCalibration), constant(speeds, name, value):
        yield


@contextmanager
def terms(change: Callable[[forecast.Weighed, SchedulingContext], forecast.Weighed], seen: Changed) -> Iterator[None]:
    """The policy works with changed terms, which it computes from what it sees."""
    weigh = forecast.weigh

    def changed(context: SchedulingContext, shares: Amounts) -> forecast.Weighed:
        return change(weigh(seen(context), shares), context)

    with constant(forecast, "weigh", changed):
        yield


def no_batch(weighed: forecast.Weighed, _: SchedulingContext) -> forecast.Weighed:
    """Others in the step do not count."""
    return weighed._replace(batch=np.zeros_like(weighed.batch))


def any_fits(weighed: forecast.Weighed, context: SchedulingContext) -> forecast.Weighed:
    """Calibration uses every rank without a prompt to compute."""
    return weighed._replace(fit=context.prefill_requests == 0)


def no_eviction(weighed: forecast.Weighed, _: SchedulingContext) -> forecast.Weighed:
    """Evicted blocks cost nothing."""
    return weighed._replace(eviction=np.zeros_like(weighed.eviction))


def no_copies(weighed: forecast.Weighed, _: SchedulingContext) -> forecast.Weighed:
    """Popular blocks cost their whole time."""
    return weighed._replace(copies=np.zeros_like(weighed.copies))


def unchanged(given: SchedulingContext) -> SchedulingContext:
    """The policy sees what there is."""
    return given


def no_progress(given: SchedulingContext) -> SchedulingContext:
    """Nothing is known of the prompt that is being computed."""
    none = Loads(bytearray(given.loads.packed), given.now)  # whose columns can be written to
    none.head_prefill_tokens[:], none.head_prefill_since[:] = 0, np.inf
    return replace(given, loads=none)


def idle_fits(weighed: forecast.Weighed, context: SchedulingContext) -> forecast.Weighed:
    """Calibration still needs a rank without a prompt to compute."""
    return weighed._replace(fit=weighed.fit & (context.prefill_requests == 0))


def in_proportion(tokens: Any, budget: Any, decode: Any) -> Any:  # noqa: ARG001 - stands in for prefill_ms
    """Prefill in proportion to tokens, whatever else a step does."""
    return tokens * MS_PER_TOKEN


PARTS: Mapping[str, Callable[[], Any]] = {
    "shortage": lambda: constant(forecast, "SHORTAGE_MS", 0.0),
    "queue": lambda: constant(router, "RequestQueue", partial(request_queue.RequestQueue, 0)),
    "b": lambda: constant(forecast, "BASE", 0.0),
    "crowd": lambda: constant(forecast, "CROWD", 0.0),
    "batch": lambda: terms(no_batch, unchanged),
    "eviction": lambda: terms(no_eviction, unchanged),
    "copies": lambda: terms(no_copies, unchanged),
    "progress": lambda: terms(idle_fits, no_progress),
    "decode": lambda: constant(forecast, "decode_ms", np.zeros_like),
    "steps": lambda: constant(forecast, "prefill_ms", in_proportion),
    "curves": lambda: mock.patch.multiple(forecast, **LINEAR),
    "room": lambda: constant(forecast, "ROOM", 1.0),
    "fit": lambda: terms(any_fits, unchanged),
    "latency-calibration": lambda: learned("STEP", 0.0),
    "relative-latency": lambda: learned("DOUBT", math.inf),
    "output": lambda: constant(forecast, "OUTPUT_TOKENS", 0.0),
    "distinct-blocks": lambda: constant(router, "Accounting", partial(Accounting, assume_kv_reuse=False)),
    "least-first": lambda: constant(request_queue, "AGING", 1e9),
}
"""What is taken away: for its time, the code is another."""


COMPLETE = "complete"
CELLS = "prompts@3,prompts@4,chat@5,chat@7,documents@2,documents@3"


@dataclass(frozen=True, slots=True)
class Change:
    """What taking a part away changes, over seeds: medians say little where runs are chaotic, so means with errors."""

    mean: Sequence[float]
    """Time to first token, percent."""
    p99: Sequence[float]
    """Its 99th percentile, percent."""
    slo: Sequence[float]
    """Share of requests within their objectives, percentage points."""

    def text(self) -> str:
        """As a cell of the table."""
        return f"{with_error(self.mean)} / {with_error(self.p99)} / {with_error(self.slo)}"


def with_error(values: Sequence[float]) -> str:
    """Mean and its standard error; bold where the mean is more than twice that from 0."""
    if len(values) < 2:
        return f"{values[0]:+.1f}"
    middle, error = fmean(values), stdev(values) / math.sqrt(len(values))
    text = f"{middle:+.1f} ± {error:.1f}"
    return f"**{text}**" if abs(middle) > 2 * error else text


def changes(known: Mapping[str, Any], spec: str, condition: str, part: str, seeds: Sequence[int]) -> Change | None:
    """Those of one part, over the seeds that were run with it and without."""
    both = [
        (known[key], known[whole])
        for seed in seeds
        if (key := key_of(spec, seed, condition, part)) in known
        and (whole := key_of(spec, seed, condition, COMPLETE)) in known
    ]
    if not both:
        return None
    return Change(
        *([100 * (without[name] / complete[name] - 1) for without, complete in both] for name in ("mean", "p99")),
        [100 * (without["slo"] - complete["slo"]) for without, complete in both],
    )


def key_of(spec: str, seed: int, condition: str, part: str) -> str:
    """Name of a run in the results."""
    return f"{spec}#{seed}/{condition}/{part}"


def run_missing(options: argparse.Namespace, known: dict[str, Any], parts: Sequence[str], until: float) -> None:
    """Runs what is missing until that time."""
    with options.results.open("a", encoding="utf-8") as lines:
        for seed, spec in itertools.product(range(options.seeds), options.on.split(",")):
            missing = [part for part in parts if key_of(spec, seed, options.condition, part) not in known]
            if not missing:
                continue
            traffic, _, load = spec.partition("@")
            cell = Cell(traffic, seed, options.condition, float(load), "forecast")
            for part in missing:
                if time.monotonic() > until:
                    return
                # What is taken away is taken from the computation in Python.
                with constant(forecast, "NATIVE", None), PARTS[part]() if part in PARTS else nullcontext():
                    row = measure(cell, options.trace) | {"key": key_of(spec, seed, options.condition, part)}
                known[row["key"]] = row
                lines.write(json.dumps(row) + "\n")
                lines.flush()


def show(options: argparse.Namespace, known: Mapping[str, Any], parts: Sequence[str]) -> None:
    """Prints a row for each part, a column for each workload."""
    specs = options.on.split(",")
    print("| without | " + " | ".join(specs) + " |\n" + "|---" * (len(specs) + 1) + "|")
    for part in parts[1:]:
        found = [changes(known, spec, options.condition, part, range(options.seeds)) for spec in specs]
        print(f"| `{part}` | " + " | ".join(each.text() if each else "" for each in found) + " |")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", default=CELLS, help="workloads with their load")
    parser.add_argument("--without", default=",".join(PARTS), help="parts")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--condition", default="plain", choices=CONDITIONS)
    parser.add_argument("--trace", type=Path, default=SHARED_TRACE)
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "ablation.jsonl")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="stop after this time, in minutes; the next call continues"
    )
    parser.add_argument("--fresh", action="store_true", help="delete earlier results, because the code has changed")
    options = parser.parse_args()
    known = results_by_key(options.results, fresh=options.fresh)
    parts = (COMPLETE, *filter(None, options.without.split(",")))
    run_missing(options, known, parts, time.monotonic() + options.minutes * 60)
    show(options, known, parts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
