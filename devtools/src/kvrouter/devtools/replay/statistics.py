"""Computes the statistics of a run from its records."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvrouter.devtools.replay.open_loop import ReplayResult
from kvrouter.devtools.replay.pacing import TimeScale
from kvrouter.devtools.replay.records import RequestRecord
from kvrouter.scheduler.policies.catalogue import POLICIES

MAX_LATE_ENGINE_MS = 100.0
"""Limit on the p99 of send lateness, beyond which a run is invalid. It is less than half the median TTFT near the knee,
so that lateness cannot cause or hide the difference between two modes."""
MAX_STEP_LATE_MS = 100.0
"""The same limit for the lateness of the engines' steps (p99, engine milliseconds)."""

_PREDICTING_MODES = frozenset(mode for mode, policy in POLICIES.items() if policy.uses_overlap)
"""The other modes query no Indexer and report an overlap of 0."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Distribution of a time, milliseconds. All NaN without samples."""

    p50: float
    p90: float
    p99: float
    mean: float
    largest: float


@dataclass(frozen=True, slots=True)
class Balance:
    """How evenly the computed prompt tokens are distributed over the ranks."""

    tokens_by_rank: dict[str, int]
    """Prompt tokens computed (not cached), by `worker/rank`."""
    variation: float
    """Standard deviation divided by mean; 0 is even."""
    peak: float
    """Maximum divided by mean; 1 is even."""


@dataclass(frozen=True, slots=True)
class SystemCounts:
    """What the system itself counted during a run."""

    events_applied: int | None = None
    """Cache events that the Indexer applied."""
    events_faulty: int | None = None
    """Gaps, unknown parents, rejected and unparsable messages that the Indexer counted: 0 in a sound run."""
    step_late_p99_ms: float | None = None
    """p99 of the lateness of the engines' steps, engine milliseconds."""


@dataclass(frozen=True, slots=True)
class RunStatistics:
    """Statistics of one run. Times of engines are engine time, those of the router wall time."""

    mode: str
    workers: int
    load: float
    clock: float
    requests: int
    completed: int
    errors: dict[str, int]
    """Number of failed requests by status code."""
    error_examples: dict[str, str]
    """Message of the first failure by status code."""
    hit_rate: float
    """Cached prompt tokens divided by prompt tokens, as the workers count them."""
    host_rate: float
    """Prompt tokens loaded from host memory divided by prompt tokens; NaN if none were."""
    shared_rate: float
    """The same for shared storage."""
    possible_hit_rate: float
    """``hit_rate`` of one unlimited cache: see ``kvrouter.devtools.traces.reuse``. NaN if it is unknown."""
    prediction_exact: float
    """Share of requests whose predicted overlap equals what the worker found in its cache; NaN in modes that do not
    predict. Below 1 under load, since caches change between decision and prefill."""
    ttft_ms: Quantiles
    itl_ms: Quantiles
    router_ms: Quantiles
    requests_per_engine_s: float
    requests_per_wall_s: float
    output_tokens: int
    preemptions: int
    retried: int
    balance: Balance
    counts: SystemCounts
    late_wall_ms: Quantiles
    late_engine_ms: Quantiles
    wall_s: float
    times_limited: int
    invalid: list[str]
    """Why the run must not be used; empty for a valid run."""

    @property
    def valid(self) -> bool:
        """Whether the statistics may be used."""
        return not self.invalid

    @property
    def output_tokens_per_engine_s(self) -> float:
        """Output tokens of all requests divided by the duration; NaN if no request completed."""
        return self.output_tokens / self.completed * self.requests_per_engine_s if self.completed else math.nan

    def as_json(self) -> dict[str, Any]:
        """Returns the statistics as JSON values; values that could not be measured are null."""
        derived = {"valid": self.valid, "output_tokens_per_engine_s": self.output_tokens_per_engine_s}
        values: dict[str, Any] = _without_nan(derived | asdict(self))
        return values


def quantiles(samples: Iterable[float]) -> Quantiles:
    """Returns p50, p90, p99 (nearest rank: a value that occurred), mean and maximum of samples in milliseconds."""
    ordered = sorted(samples)
    if not ordered:
        return Quantiles(math.nan, math.nan, math.nan, math.nan, math.nan)

    def nearest(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    return Quantiles(nearest(0.50), nearest(0.90), nearest(0.99), math.fsum(ordered) / len(ordered), ordered[-1])


def hit_rate(records: Iterable[RequestRecord]) -> float:
    """Returns cached divided by all prompt tokens, over requests whose worker reported them; NaN if there are none."""
    cached = prompt = 0
    for record in records:
        if record.cached_tokens is not None:
            cached += record.cached_tokens
            prompt += record.prompt_tokens
    return cached / prompt if prompt else math.nan


def loaded_rate(records: Sequence[RequestRecord], field: Literal["host_tokens", "shared_tokens"]) -> float:
    """Returns the tokens loaded from a tier divided by all prompt tokens; NaN if none were."""
    loaded = sum(getattr(record, field) for record in records)
    return loaded / sum(record.prompt_tokens for record in records) if loaded else math.nan


def expected_cached_tokens(overlap_blocks: int, prompt_tokens: int, block_size: int) -> int:
    """Returns the tokens that an engine takes from its cache if it has `overlap_blocks` leading blocks of a prompt.

    It always computes the last token and reuses whole blocks: at most (prompt tokens - 1) div block size of them.
    """
    return min(overlap_blocks, (prompt_tokens - 1) // block_size) * block_size


def balance(records: Sequence[RequestRecord], workers: int) -> Balance:
    """Returns the balance over `workers` ranks; ranks without any request count as 0."""
    by_rank: defaultdict[tuple[int, int], int] = defaultdict(int)
    for record in records:
        if record.worker is not None and record.cached_tokens is not None:
            by_rank[record.worker] += record.prompt_tokens - record.cached_tokens
    loads = list(by_rank.values()) + [0] * (workers - len(by_rank))
    mean = sum(loads) / len(loads) if loads else 0.0
    named = {f"{worker}/{rank}": tokens for (worker, rank), tokens in sorted(by_rank.items())}
    if not mean:
        return Balance(named, math.nan, math.nan)
    deviation = math.sqrt(sum((load - mean) ** 2 for load in loads) / len(loads))
    return Balance(named, deviation / mean, max(loads) / mean)


def statistics_of_run(
    result: ReplayResult,
    *,
    mode: str,
    workers: int,
    block_size: int,
    time_scale: TimeScale,
    counts: SystemCounts,
    possible_hit_rate: float = math.nan,
) -> RunStatistics:
    """Computes all statistics of a run."""
    records = result.records
    completed = [record for record in records if record.completed]
    late_wall = quantiles(record.late_wall_ms for record in records)
    late_engine = quantiles(record.late_wall_ms * time_scale.clock for record in records)
    span = max((record.ended_engine_s or 0.0 for record in records), default=0.0)
    return RunStatistics(
        mode=mode,
        workers=workers,
        load=time_scale.load,
        clock=time_scale.clock,
        requests=len(records),
        completed=len(completed),
        errors=dict(Counter(record.error for record in records if record.error is not None)),
        error_examples={record.error: record.error_message for record in reversed(records) if record.error is not None},
        hit_rate=hit_rate(completed),
        host_rate=loaded_rate(completed, "host_tokens"),
        shared_rate=loaded_rate(completed, "shared_tokens"),
        possible_hit_rate=possible_hit_rate,
        prediction_exact=_prediction_exact(completed, block_size) if mode in _PREDICTING_MODES else math.nan,
        ttft_ms=quantiles(record.ttft_ms for record in completed if record.ttft_ms is not None),
        itl_ms=quantiles(gap for record in completed for gap in record.itl_ms),
        router_ms=quantiles(record.router_ms for record in completed if record.router_ms is not None),
        requests_per_engine_s=len(completed) / span if span else math.nan,
        requests_per_wall_s=len(completed) / result.wall_seconds if result.wall_seconds else math.nan,
        output_tokens=sum(record.output_tokens for record in records),
        preemptions=sum(record.preemptions for record in records),
        retried=sum(record.attempts > 1 for record in records),
        balance=balance(completed, workers),
        counts=counts,
        late_wall_ms=late_wall,
        late_engine_ms=late_engine,
        wall_s=result.wall_seconds,
        times_limited=result.times_limited,
        invalid=invalid_reasons(len(completed), late_engine, counts, result.times_limited),
    )


def invalid_reasons(completed: int, late_engine: Quantiles, counts: SystemCounts, times_limited: int) -> list[str]:
    """Returns why a run measures the machine instead of the system; empty if it is valid."""
    reasons = []
    if not completed:
        reasons.append("no request completed")
    if late_engine.p99 > MAX_LATE_ENGINE_MS:
        reasons.append(
            f"requests were sent late: p99 {late_engine.p99:.0f} engine ms, the limit is {MAX_LATE_ENGINE_MS:.0f}"
        )
    if counts.step_late_p99_ms is not None and counts.step_late_p99_ms > MAX_STEP_LATE_MS:
        reasons.append(
            f"engine steps ended late: p99 {counts.step_late_p99_ms:.0f} engine ms, the limit is {MAX_STEP_LATE_MS:.0f}"
        )
    if times_limited:
        reasons.append(f"{times_limited} requests waited because too many were in flight")
    return reasons


def _prediction_exact(records: Sequence[RequestRecord], block_size: int) -> float:
    exact = [
        expected_cached_tokens(record.predicted_overlap_blocks, record.prompt_tokens, block_size)
        == record.cached_tokens
        for record in records
        if record.predicted_overlap_blocks is not None and record.cached_tokens is not None
    ]
    return sum(exact) / len(exact) if exact else math.nan


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
