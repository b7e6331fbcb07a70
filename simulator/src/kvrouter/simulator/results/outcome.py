"""What came of a run, and the statistics that sum it up."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvrouter.simulator.engines.fleet import EngineLoad, Totals


@dataclass(slots=True)
class Served:
    """One request. Times are seconds after the start."""

    arrived_at: float
    prompt_tokens: int
    output_tokens: int
    engine: int = -1
    """The last one that it was sent to."""
    sent_at: float = math.nan
    """When it was sent there; later than ``arrived_at`` if the router held it."""
    first_at: float = math.nan
    ended_at: float = math.nan
    cached_tokens: int = 0
    """Prompt tokens found in the engine's cache."""
    attempts: int = 1
    """Times that it was sent; more than 1 if an engine restarted under it."""
    failed: bool = False
    """Its engine restarted when part of its output was out."""
    regret_ms: float = math.nan
    """Time to first token that the best engine would have spared; not a number where it was not looked at."""

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_at - self.arrived_at

    @property
    def itl_s(self) -> float:
        """Mean time between its tokens; 0 for a single one."""
        return (self.ended_at - self.first_at) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Dispersion:
    """Quantiles and mean."""

    p50: float
    p90: float
    p99: float
    mean: float


def spread(ordered: Sequence[float], scale: float = 1.0) -> Dispersion:
    """Of sorted values, each multiplied by ``scale``; quantiles are interpolated linearly."""
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
        """A request arrives, and this is what engines have to do."""
        blocks = [load.active_blocks for load in loads]
        self.arrivals += 1
        self.fullest_blocks += max(blocks)
        self.mean_blocks += sum(blocks) / len(blocks)
        self.longest_prefill += max(load.prefill_tokens for load in loads)


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that is kept of a run."""

    served: Sequence[Served]
    gaps_s: array[float]
    """Seconds between tokens, over all requests, sorted."""
    totals: Totals
    peaks: Peaks


@dataclass(frozen=True, slots=True)
class RunStatistics:
    """A run in numbers."""

    requests: int
    reuse: float
    """Share of the prompt tokens that came out of a cache."""
    readmitted_reuse: float
    """The same, counting also what requests find of themselves after a preemption; may be above ``reuse``."""
    ttft_ms: Dispersion
    itl_ms: Dispersion
    within_slo: int
    """Requests whose time to first token and mean time between tokens kept to their objectives."""
    goodput_per_s: float
    """Those per second."""
    requests_per_s: float
    output_tokens_per_s: float
    imbalance: float
    """Time that the busiest engine computed, over the mean; 1 is even."""
    block_peak: float
    """Active blocks of the fullest engine over the mean of all, seen by arriving requests; 1 is even."""
    longest_prefill_tokens: float
    """Prompt tokens that wait at the engine with most of them, seen by arriving requests."""
    queued: int
    """Requests that the router kept for a while."""
    failed: int
    """Requests whose engine restarted when part of their output was out."""
    retried: int
    """Requests sent again, since their engine restarted before their first token."""
    preemptions: int
    regret_ms: float
    """Mean time to first token that the best engine would have spared a request, looked at alone."""
    span_s: float
    """From the start to the last token."""

    @property
    def good_share(self) -> float:
        """Share of the requests that kept to their objectives; 0 where none was served."""
        return self.within_slo / max(self.requests, 1)


def run_statistics(outcome: Outcome, *, slo_ttft_s: float, slo_itl_s: float) -> RunStatistics:
    """The statistics of a run; not a number where nothing was served."""
    served = [request for request in outcome.served if not request.failed]
    regrets = [request.regret_ms for request in served if not math.isnan(request.regret_ms)]
    ttft = sorted(request.ttft_s for request in served)
    good = sum(1 for request in served if request.ttft_s <= slo_ttft_s and request.itl_s <= slo_itl_s)
    span = max((request.ended_at for request in served), default=math.nan)
    prompt_tokens = sum(request.prompt_tokens for request in served)
    busy, peaks = outcome.totals.busy_seconds, outcome.peaks
    return RunStatistics(
        requests=len(served),
        reuse=_ratio(sum(request.cached_tokens for request in served), prompt_tokens),
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
        failed=len(outcome.served) - len(served),
        retried=sum(1 for request in served if request.attempts > 1),
        regret_ms=_ratio(math.fsum(regrets), len(regrets)),
        preemptions=outcome.totals.preemptions,
        span_s=span,
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
