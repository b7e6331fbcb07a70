"""Metrics with vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from kvrouter.mocker.driver import EngineDriver
from kvrouter.mocker.engine.types import Load
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_GAUGES: Mapping[str, tuple[str, Callable[[Load], float]]] = {
    "num_requests_running": ("Number of requests in model execution batches.", lambda load: load.running),
    "num_requests_waiting": ("Number of requests waiting to be processed.", lambda load: load.waiting),
    "kv_cache_usage_perc": (
        "KV-cache usage. 1 means 100 percent usage.",
        lambda load: load.active_blocks / load.total_blocks,
    ),
}
_COUNTERS: Mapping[str, tuple[str, Callable[[EngineDriver], int]]] = {
    "prefix_cache_queries": ("Prefix cache queries, in queried tokens.", lambda driver: driver.prompt_tokens_total),
    "prefix_cache_hits": ("Prefix cache hits, in cached tokens.", lambda driver: driver.cached_tokens_total),
    "prompt_tokens": ("Number of prefill tokens processed.", lambda driver: driver.prompt_tokens_total),
    "prompt_tokens_cached": ("Number of cached prompt tokens.", lambda driver: driver.cached_tokens_total),
}


class VllmMetrics(Collector):
    """Reads the load of each rank, the label ``engine``, when it is scraped."""

    def __init__(self, model: str, drivers: Mapping[int, EngineDriver]) -> None:
        self._model = model
        self._drivers = drivers

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics."""
        labels = ["model_name", "engine"]
        loads = {str(dp_rank): driver.engine.load() for dp_rank, driver in self._drivers.items()}
        for name, (text, value) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=labels)
            for engine, load in loads.items():
                gauge.add_metric([self._model, engine], value(load))
            yield gauge
        for name, (text, total) in _COUNTERS.items():
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=labels)
            for dp_rank, driver in self._drivers.items():
                counter.add_metric([self._model, str(dp_rank)], total(driver))
            yield counter
        by_reason = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Number of waiting requests by reason.", labels=[*labels, "reason"]
        )
        for engine, load in loads.items():
            by_reason.add_metric([self._model, engine, "capacity"], load.waiting)
            by_reason.add_metric([self._model, engine, "deferred"], 0)
        yield by_reason
        yield self._cache_config()

    def _cache_config(self) -> Metric:
        labels = ["block_size", "num_gpu_blocks", "enable_prefix_caching", "engine"]
        config = GaugeMetricFamily("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=labels)
        for dp_rank, driver in self._drivers.items():
            engine = driver.engine.config
            config.add_metric([str(engine.block_size), str(engine.num_blocks), "True", str(dp_rank)], 1)
        return config
