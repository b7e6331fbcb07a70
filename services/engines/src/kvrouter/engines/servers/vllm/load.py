"""Reads the load of a vLLM server from its metrics."""

from __future__ import annotations

from collections.abc import Mapping

from kvrouter.engines.servers.metrics_text import rank_of, read_samples
from kvrouter.v1.events_pb2 import LoadReport

_RUNNING, _WAITING, _USAGE = (*("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),)


def read_loads(page: bytes, ranks: Mapping[int, int]) -> tuple[dict[int, LoadReport], int]:
    """Returns the load of each rank that reports it completely, and how many values were unusable.

    ``ranks`` has each rank's KV blocks. The usage is that of running requests: cached blocks count as free.
    """
    samples, unusable = read_samples(page, {_RUNNING, _WAITING, _USAGE})
    values: dict[int, dict[str, float]] = {}
    for sample in samples:
        rank = rank_of(sample, "engine", ranks)
        if rank is None or (sample.name == _USAGE and sample.value > 1):
            unusable += 1
            continue
        values.setdefault(rank, {})[sample.name] = sample.value
    loads = {
        rank: LoadReport(
            running_requests=round(each[_RUNNING]),
            waiting_requests=round(each[_WAITING]),
            active_blocks=round(each[_USAGE] * ranks[rank]),
            total_blocks=ranks[rank],
        )
        for rank, each in values.items()
        if len(each) == 3 and max(each.values()) < 1 << 31
    }
    return loads, unusable
