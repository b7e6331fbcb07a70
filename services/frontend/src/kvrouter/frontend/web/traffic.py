"""Latency, throughput and errors of this Frontend's clients in the last minute."""

from __future__ import annotations

from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvrouter.frontend.metrics import FrontendMetrics
from prometheus_client import Counter

_WINDOW_SECONDS = 60.0
_QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_Quantiles = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of a Frontend since its start."""

    requests: Tally[str]
    """Ended requests by outcome, a gRPC code."""
    output_tokens: int
    ttft: tuple[int, ...]
    """Times to first token by bucket."""
    inter_token: tuple[int, ...]
    """Times between tokens by bucket."""
    http_errors: Tally[str]
    """Failed HTTP responses by status and code of the error."""


@dataclass(frozen=True, slots=True)
class TrafficRates:
    """Traffic in a time window. Quantiles are p50, p95 and p99, in seconds; None without samples."""

    seconds: float
    """Length of the window."""
    requests_per_second: float
    output_tokens_per_second: float
    ttft_seconds: _Quantiles
    inter_token_seconds: _Quantiles
    ttft_samples: int
    """Number of times to first token behind the quantiles."""
    inter_token_samples: int
    errors: list[dict[str, str | int]]
    """Requests that did not succeed, by gRPC code: in the window, and since the start."""
    http_errors: list[dict[str, str | int]]
    """Failed HTTP responses by status and code of the error: in the window, and since the start."""


class Traffic:
    """Counts of the last minute."""

    def __init__(self, metrics: FrontendMetrics) -> None:
        self._metrics = metrics
        self._samples: deque[tuple[float, Counts]] = deque()

    def take(self, now: float) -> None:
        """Adds a sample, with its time in seconds of a monotonic clock."""
        self._samples.append((now, counts_of(self._metrics)))
        # The window starts at the last sample before it.
        while len(self._samples) > 1 and self._samples[1][0] <= now - _WINDOW_SECONDS:
            self._samples.popleft()

    def rates(self, now: float) -> TrafficRates | None:
        """Returns the traffic since the beginning of the window; None before the first sample."""
        if not self._samples or now <= self._samples[0][0]:
            return None
        at, before = self._samples[0]
        counts, seconds = counts_of(self._metrics), now - at
        ended = {code: count - before.requests[code] for code, count in counts.requests.items()}
        models = self._metrics.models
        return TrafficRates(
            seconds,
            sum(ended.values()) / seconds,
            (counts.output_tokens - before.output_tokens) / seconds,
            _quantiles(models.ttft_seconds.bounds, before.ttft, counts.ttft),
            _quantiles(models.token_latency.bounds, before.inter_token, counts.inter_token),
            sum(counts.ttft) - sum(before.ttft),
            sum(counts.inter_token) - sum(before.inter_token),
            [
                {"code": code, "recent": ended[code], "total": total}
                for code, total in sorted(counts.requests.items())
                if code != "OK" and total
            ],
            [
                {"error": error, "recent": total - before.http_errors[error], "total": total}
                for error, total in sorted(counts.http_errors.items())
            ],
        )


def counts_of(metrics: FrontendMetrics) -> Counts:
    """Returns the counts of all models together."""
    requests = _tally(metrics.requests, lambda labels: labels["code"])
    output = _tally(metrics.models.output_tokens, lambda _: "").total()
    http_errors = _tally(metrics.http_errors, lambda labels: f"{labels['status']} {labels['code']}".rstrip())
    models = metrics.models
    return Counts(requests, output, models.ttft_seconds.counts(), models.token_latency.counts(), http_errors)


def _tally(counter: Counter, key: Callable[[Mapping[str, str]], str]) -> Tally[str]:
    tally = Tally[str]()
    for family in counter.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                tally[key(sample.labels)] += int(sample.value)
    return tally


def _quantiles(bounds: Sequence[float], before: Sequence[int], now: Sequence[int]) -> _Quantiles:
    counts = [after - count for after, count in zip(now, before, strict=True)]
    return {name: quantile(bounds, counts, share) for name, share in _QUANTILES.items()}


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Returns a quantile of a histogram, interpolated within its bucket as Prometheus's ``histogram_quantile``.

    Args:
        bounds: Upper bounds of the buckets, ascending; the last bucket has none, and counts as its lower bound.
        counts: Observations in each bucket, one more than bounds.
        share: The quantile, 0 to 1.
    """
    wanted, lower = share * sum(counts), 0.0
    if not wanted:
        return None
    for upper, count in zip(bounds, counts, strict=False):
        if wanted <= count:
            return lower + (upper - lower) * wanted / count
        wanted -= count
        lower = upper
    return lower
