"""Latency, throughput and errors of this Frontend's clients in the last minute, and the system's last hour."""

from __future__ import annotations

from collections import Counter as Tally, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.runtime.overview.ranks import increase
from kvrouter.runtime.overview.system import System, name_of
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import ComponentStatus, ComponentSums, HitCounts
from prometheus_client.registry import Collector

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


def _tally(counter: Collector, key: Callable[[Mapping[str, str]], str]) -> Tally[str]:
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


INTERVAL_SECONDS = 10.0
REST_SECONDS = 30.0
"""Interval while nothing runs."""
_KEPT_SECONDS = 3600.0
_MAX_POINTS = 360
"""Points of an hour with requests. The wall clock may be set back, so their age alone is no bound."""

_Key = tuple[str, int, ComponentName]
"""(Scheduler, its start, component)."""
_Counts = tuple[int, int, int, int, int]
"""(requests, prompt tokens, cached tokens, prompt tokens with a prediction, tokens that some rank held)."""


@dataclass(frozen=True, slots=True)
class Point:
    """The events of one interval."""

    at: float
    """Unix time of its end, seconds."""
    seconds: float
    """Its length: since the newest sample before with a component."""
    requests: int
    """Requests that ended, of those whose worker reported its cached tokens."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens found in a cache, and so did not have to be computed."""
    predicted_prompt_tokens: int
    """Prompt tokens of the requests whose cached tokens were predicted."""
    reachable_tokens: int
    """Tokens of these in the cache of the rank that held most of the prompt."""
    active_requests: int
    """Booked requests at its end."""
    active_share: float | None
    """KV blocks of booked requests over all KV blocks, 0 to 1; None if no rank says how many it has."""


class History:
    """Points of the last hour. Pure: samples are given to it."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=_MAX_POINTS)
        self._before: dict[_Key, _Counts] | None = None
        self._before_at = 0.0
        self._is_answered = False
        """Whether the newest sample has a component."""

    @property
    def points(self) -> list[Point]:
        """The points, oldest first."""
        return list(self._points)

    @property
    def at_rest(self) -> bool:
        """Whether no request ran at the end of the last interval, and none ended in it."""
        points = self._points
        return self._is_answered and bool(points) and not (points[-1].active_requests or points[-1].requests)

    def take(self, system: System, now: float) -> None:
        """Adds a point for the time since the previous sample. The first sample only sets the counts.

        Args:
            system: Sums of the components.
            now: Seconds of a monotonic clock.
        """
        counts, at = _counts(system), system.at.timestamp()
        self._is_answered = bool(counts)
        if self._before is not None:
            sums = _booked(system)
            blocks = sum(each.total_blocks for each in sums)
            point = Point(
                at,
                now - self._before_at,
                *_since(self._before, counts),
                active_requests=sum(each.active_requests for each in sums),
                active_share=sum(each.active_blocks for each in sums) / blocks if blocks else None,
            )
            self._points.append(point)
            while self._points[0].at <= at - _KEPT_SECONDS:
                self._points.popleft()
        if counts or self._before is None:
            # While no Scheduler answers, the former counts stay, so that what happened meanwhile is not lost.
            self._before, self._before_at = counts, now


def _counts(system: System) -> dict[_Key, _Counts]:
    return {
        (status.scheduler_id, status.started_unix_ns, name_of(each.component)): (
            hits.requests,
            hits.prompt_tokens,
            hits.cached_tokens,
            hits.predicted_prompt_tokens,
            hits.reachable_cached_tokens,
        )
        for status in system.statuses
        for each in status.components
        for hits in (_sums(each).cache_hits,)
    }


def _booked(system: System) -> Collection[ComponentSums]:
    """Returns the sums of each component by the Scheduler with most bookings: others replicate them or have none."""
    most: dict[ComponentName, ComponentSums] = {}
    for status in system.statuses:
        for each in status.components:
            name, sums = name_of(each.component), _sums(each)
            if name not in most or _size(sums) > _size(most[name]):
                most[name] = sums
    return most.values()


def _size(sums: ComponentSums) -> tuple[int, int]:
    return sums.active_requests, sums.total_blocks


def _sums(status: ComponentStatus) -> ComponentSums:
    """Returns the sums over the ranks of a component, which earlier Schedulers list instead."""
    if "sums" in status:
        return status.sums
    ranks, hits = status.ranks, HitCounts()
    for name in ("requests", "prompt_tokens", "cached_tokens", "predicted_prompt_tokens", "reachable_cached_tokens"):
        setattr(hits, name, sum(getattr(rank.cache_hits, name) for rank in ranks))
    return ComponentSums(
        total_blocks=sum(rank.total_blocks for rank in ranks),
        active_blocks=sum(rank.active_blocks for rank in ranks),
        active_requests=sum(rank.active_requests for rank in ranks),
        cache_hits=hits,
    )


def _since(before: dict[_Key, _Counts], now: dict[_Key, _Counts]) -> _Counts:
    nothing: _Counts = (0, 0, 0, 0, 0)
    increases = [increase(before.get(key, nothing), counts) for key, counts in now.items()]
    a, b, c, d, e = map(sum, zip(nothing, *increases, strict=True))
    return a, b, c, d, e
