"""Metrics with SGLang's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from kvrouter.mocker.driver import EngineDriver
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

Read = Callable[[EngineDriver], float]


def _capacity(driver: EngineDriver) -> int:
    return driver.engine.config.capacity_tokens


def _used_tokens(driver: EngineDriver) -> int:
    return driver.engine.load().active_blocks * driver.engine.config.block_size


def _evictable_tokens(driver: EngineDriver) -> int:
    return driver.engine.load().cached_blocks * driver.engine.config.block_size


def _hit_rate(driver: EngineDriver) -> float:
    return driver.cached_tokens_total / driver.prompt_tokens_total if driver.prompt_tokens_total else 0.0


_GAUGES: Mapping[str, tuple[str, Read]] = {
    "num_running_reqs": ("The number of running requests.", lambda driver: driver.engine.load().running),
    "num_queue_reqs": ("The number of requests in the waiting queue.", lambda driver: driver.engine.load().waiting),
    "num_used_tokens": ("The number of used tokens.", _used_tokens),
    "token_usage": ("The token usage.", lambda driver: _used_tokens(driver) / _capacity(driver)),
    "max_total_num_tokens": ("Maximum total number of tokens in the KV cache pool.", _capacity),
    "kv_evictable_tokens": ("Tokens in the KV cache that can be evicted.", _evictable_tokens),
    "page_size": ("Tokens per page of the KV cache.", lambda driver: driver.engine.config.block_size),
    "cache_hit_rate": ("The prefix cache hit rate.", _hit_rate),
}
_COUNTERS: Mapping[str, tuple[str, Read]] = {
    "prompt_tokens": ("Number of prefill tokens processed.", lambda driver: driver.prompt_tokens_total),
    "cached_tokens": ("Number of cached prompt tokens.", lambda driver: driver.cached_tokens_total),
}


class SglangMetrics(Collector):
    """Reads the load of each rank when it is scraped."""

    def __init__(self, model: str, engine_type: str, drivers: Mapping[int, EngineDriver]) -> None:
        self._labels = {"model_name": model, "engine_type": engine_type, "tp_rank": "0", "pp_rank": "0"}
        self._drivers = drivers

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics."""
        names = [*self._labels, "dp_rank"]
        for name, (text, read) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"sglang:{name}", text, labels=names)
            for dp_rank, driver in self._drivers.items():
                gauge.add_metric([*self._labels.values(), str(dp_rank)], read(driver))
            yield gauge
        for name, (text, read) in _COUNTERS.items():
            counter = CounterMetricFamily(f"sglang:{name}", text, labels=names)
            for dp_rank, driver in self._drivers.items():
                counter.add_metric([*self._labels.values(), str(dp_rank)], read(driver))
            yield counter
