"""Reads what a vLLM server says of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from kvrouter.engines.relay.engine_sockets import Endpoints
from kvrouter.engines.servers.description import Discovered, Models, at_host, read_models
from kvrouter.engines.servers.http import EngineAway, EngineHttp, UnexpectedAnswer
from kvrouter.engines.servers.metrics_text import EngineSample, read_samples

_CACHE_CONFIG = "vllm:cache_config_info"


class EventSocket(msgspec.Struct):
    """An entry of ``/kv_event_sources``. vLLM 0.33 lists entries by rank; later releases name the rank in each."""

    endpoint: str
    data_parallel_rank: int | None = None
    replay_endpoint: str | None = None
    topic: str | None = None
    enable_kv_cache_events: bool = True
    publisher: str | None = "zmq"


class SchedulerConfig(msgspec.Struct):
    """The part of vLLM's scheduler configuration that matters here."""

    max_num_seqs: int


class VllmConfig(msgspec.Struct):
    """vLLM's configuration."""

    scheduler_config: SchedulerConfig


class ServerInfo(msgspec.Struct):
    """``/server_info``, which vLLM serves with VLLM_SERVER_DEV_MODE=1 only."""

    vllm_config: VllmConfig


_EVENT_SOCKETS: Any = dict[int, EventSocket] | list[EventSocket]


async def discover(http: EngineHttp) -> Discovered:
    """Returns what the engine says of itself.

    Raises:
        EngineAway: it does not answer, or is not ready yet.
    """
    found = Discovered("vllm")
    try:
        read_models(found, await http.get_as("/v1/models", Models))
    except UnexpectedAnswer as error:
        found.problems["model"] = str(error)
    try:
        samples, _ = read_samples(await http.get("/metrics"), {_CACHE_CONFIG})
        found.is_identified = bool(samples)
        read_cache_config(found, samples)
    except UnexpectedAnswer as error:
        found.problems["block_size"] = str(error)
    try:
        sources = await http.get_as("/kv_event_sources", _EVENT_SOCKETS)
        found.events = read_event_sockets(sources, http.host)
    except UnexpectedAnswer as error:
        found.problems["events"] = str(error)
    with suppress(UnexpectedAnswer, EngineAway):  # EngineAway: vLLM answers 500 if it cannot write its configuration
        info = await http.get_as("/server_info?config_format=json", ServerInfo)
        found.max_sequences = max(0, info.vllm_config.scheduler_config.max_num_seqs) or None
    if found.events and found.ranks is not None:
        found.ranks = {rank: found.ranks.get(rank) for rank in sorted(found.events)}
    return found


def read_cache_config(found: Discovered, samples: Sequence[EngineSample]) -> None:
    """Takes block size, ranks and KV blocks from the cache's configuration, which each rank reports."""
    sizes = {int(text) for each in samples if (text := each.labels.get("block_size", "")).isdecimal() and int(text)}
    if len(sizes) == 1:
        found.block_size = sizes.pop()
    else:
        found.problems["block_size"] = (
            f"GET /metrics: expected one block_size in {_CACHE_CONFIG}, received {len(sizes)}; "
            "start the engine without --disable-log-stats, or"
        )
    blocks: dict[int, int | None] = {}
    for each in samples:
        rank, count = each.labels.get("engine", "0"), each.labels.get("num_gpu_blocks", "")
        if rank.isdecimal():
            blocks[int(rank)] = int(count) or None if count.isdecimal() else None
    found.ranks = blocks or None


def read_event_sockets(sockets: Mapping[int, EventSocket] | Sequence[EventSocket], host: str) -> dict[int, Endpoints]:
    """Returns the event sockets of the ranks that publish. A wildcard address is that of ``host``."""
    by_rank = sockets if isinstance(sockets, Mapping) else {each.data_parallel_rank or 0: each for each in sockets}
    return {
        rank: Endpoints(at_host(each.endpoint, host), at_host(each.replay_endpoint or "", host), each.topic or "")
        for rank, each in by_rank.items()
        if each.enable_kv_cache_events and each.publisher == "zmq"
    }
