"""The outcome of a run, and statistics over it."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvrouter.simulator.engines.fleet import EngineLoad, Notice, Totals


@dataclass(slots=True)
class Served:
    """One request. Times are seconds after the start."""

    arrived_at: float
    prompt_tokens: int
    output_tokens: int
    engine: int = -1
    """Last engine that it was sent to; -1 if it was refused."""
    sent_at: float = math.nan
    """Time at which it was sent there; later than ``arrived_at`` if it was queued at the Scheduler."""
    first_at: float = math.nan
    ended_at: float = math.nan
    cached_tokens: int = 0
    """Prompt tokens found in the cache of the engine that computed the prompt, in any tier."""
    host_tokens: int = 0
    """Those of them that were loaded from host memory."""
    shared_tokens: int = 0
    """Those of them that were loaded from shared storage."""
    prefill_engine: int = -1
    """Prefill engine that computed the prompt; -1 if the engine did it itself."""
    attempts: int = 1
    """Times that it was sent; more than 1 after a restart of its engine."""
    failed: bool = False
    """Whether its engine restarted after a part of its output."""
    refused: bool = False
    """Whether it was refused because all engines were busy; it is not repeated."""
    regret_ms: float = math.nan
    """Time to first token that the best engine would have saved, ms; NaN if it was not computed."""

    def found(self, notice: Notice) -> None:
        """Records what its engine found of the prompt in its cache."""
        self.cached_tokens = notice.cached_tokens
        self.host_tokens, self.shared_tokens = notice.host_tokens, notice.shared_tokens

    @property
    def was_served(self) -> bool:
        """Whether it got all of its output."""
        return not self.failed and not self.refused

    @property
    def ttft_s(self) -> float:
        """Time to first token, seconds."""
        return self.first_at - self.arrived_at

    @property
    def itl_s(self) -> float:
        """Mean time between its tokens, seconds; 0 for a single token."""
        return (self.ended_at - self.first_at) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Dispersion:
    """Quantiles and mean."""

    p50: float
    p90: float
    p99: float
    mean: float


def spread(ordered: Sequence[float], scale: float = 1.0) -> Dispersion:
    """Returns quantiles, interpolated linearly, and mean of sorted values that are multiplied by ``scale``."""
    if not ordered:
        return Dispersion(math.nan, math.nan, math.nan, math.nan)

    def quantile(share: float) -> float:
        position = share * (len(ordered) - 1)
        low = int(position)
        high = min(low + 1, len(ordered) - 1)
        return (ordered[low] + (ordered[high] - ordered[low]) * (position - low)) * scale

    return Dispersion(quantile(0.5), quantile(0.9), quantile(0.99), math.fsum(ordered) / len(ordered) * scale)


@dataclass(slots=True)
class Peaks:
    """How far the fullest engine stands out, summed over the arrivals of requests."""

    arrivals: int = 0
    fullest_blocks: int = 0
    mean_blocks: float = 0.0
    longest_prefill: int = 0
    """Tokens."""

    def see(self, loads: Sequence[EngineLoad]) -> None:
        """Adds the engines' loads at the arrival of a request."""
        blocks = [load.active_blocks for load in loads]
        self.arrivals += 1
        self.fullest_blocks += max(blocks)
        self.mean_blocks += sum(blocks) / len(blocks)
        self.longest_prefill += max(load.prefill_tokens for load in loads)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that is kept of a run."""

    served: Sequence[Served]
    gaps_s: array[float]
    """Seconds between tokens over all requests, sorted."""
    totals: Totals
    peaks: Peaks


@dataclass(frozen=True, slots=True)
class RunStatistics:
    """Statistics of a run."""

    requests: int
    """Requests that were served."""
    reuse: float
    """Share of the prompt tokens found in a cache, in any tier."""
    host_reuse: float
    """Share of the prompt tokens loaded from host memory."""
    shared_reuse: float
    """Share of the prompt tokens loaded from shared storage."""
    readmitted_reuse: float
    """``reuse``, including what requests find of their own blocks after a preemption; may exceed it."""
    ttft_ms: Dispersion
    itl_ms: Dispersion
    within_slo: int
    """Requests whose time to first token and mean time between tokens met the objectives."""
    goodput_per_s: float
    """Requests within their objectives per second."""
    requests_per_s: float
    output_tokens_per_s: float
    imbalance: float
    """Computing time of the busiest engine over the mean; 1 is even."""
    block_peak: float
    """Active blocks of the fullest engine over the mean, sampled by arriving requests; 1 is even."""
    longest_prefill_tokens: float
    """Waiting prompt tokens at the engine with most of them, sampled by arriving requests."""
    queued: int
    """Requests that were queued at the Scheduler."""
    failed: int
    """Requests whose engine restarted after a part of their output."""
    refused: int
    """Requests that were refused because all engines were busy."""
    retried: int
    """Requests sent again because their engine restarted before their first token."""
    prefilled_remotely: int
    """Requests whose prompts were computed by prefill engines."""
    preemptions: int
    regret_ms: float
    """Mean time to first token in ms that the best engine would have saved a request, taken by itself."""
    span_s: float
    """Seconds from the start to the last token."""

    @property
    def good_share(self) -> float:
        """Share of all requests that were served within their objectives."""
        return self.within_slo / max(self.requests + self.failed + self.refused, 1)

    @property
    def refused_share(self) -> float:
        """Share of all requests that were refused."""
        return self.refused / max(self.requests + self.failed + self.refused, 1)


def run_statistics(outcome: Outcome, *, slo_ttft_s: float, slo_itl_s: float) -> RunStatistics:
    """Returns the statistics of a run; NaN where nothing was served."""
    served = [request for request in outcome.served if request.was_served]
    refused = sum(1 for request in outcome.served if request.refused)
    regrets = [request.regret_ms for request in served if not math.isnan(request.regret_ms)]
    ttft = sorted(request.ttft_s for request in served)
    good = sum(1 for request in served if request.ttft_s <= slo_ttft_s and request.itl_s <= slo_itl_s)
    span = max((request.ended_at for request in served), default=math.nan)
    prompt_tokens = sum(request.prompt_tokens for request in served)
    busy, peaks = outcome.totals.busy_seconds, outcome.peaks
    return RunStatistics(
        requests=len(served),
        reuse=_ratio(sum(request.cached_tokens for request in served), prompt_tokens),
        host_reuse=_ratio(sum(request.host_tokens for request in served), prompt_tokens),
        shared_reuse=_ratio(sum(request.shared_tokens for request in served), prompt_tokens),
        readmitted_reuse=_ratio(outcome.totals.reused_tokens, prompt_tokens),
        ttft_ms=spread(ttft, 1e3),
        itl_ms=spread(outcome.gaps_s, 1e3),
        within_slo=good,
        goodput_per_s=_ratio(good, span),
        requests_per_s=_ratio(len(served), span),
        output_tokens_per_s=_ratio(sum(request.output_tokens for request in served), span),
        imbalance=_ratio(max(busy), sum(busy) / len(busy)),
        block_peak=_ratio(peaks.fullest_blocks, peaks.mean_blocks),
        longest_prefill_tokens=_ratio(peaks.longest_prefill, peaks.arrivals),
        queued=sum(1 for request in served if request.attempts == 1 and request.sent_at > request.arrived_at),
        failed=len(outcome.served) - len(served) - refused,
        refused=refused,
        prefilled_remotely=sum(1 for request in served if request.prefill_engine >= 0),
        retried=sum(1 for request in served if request.attempts > 1),
        regret_ms=_ratio(math.fsum(regrets), len(regrets)),
        preemptions=outcome.totals.preemptions,
        span_s=span,
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
