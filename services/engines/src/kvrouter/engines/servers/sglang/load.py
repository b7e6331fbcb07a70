"""Reads the load of an SGLang server."""

from __future__ import annotations

from typing import Annotated

import msgspec
from kvrouter.engines.events.zmq_messages import MalformedMessage
from kvrouter.engines.servers.description import EngineDescription
from kvrouter.engines.servers.metrics_text import rank_of, read_samples
from kvrouter.v1.events_pb2 import LoadReport

_RUNNING, _WAITING, _USED = "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:num_used_tokens"

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class RankLoad(msgspec.Struct):
    """An entry of ``/v1/loads``."""

    num_running_reqs: _Count
    num_waiting_reqs: _Count
    num_used_tokens: _Tokens
    num_waiting_uncached_tokens: _Tokens = 0
    dp_rank: int = 0


class Loads(msgspec.Struct):
    """The page ``/v1/loads``."""

    loads: list[msgspec.Raw]


class LoadStat(msgspec.Struct, array_like=True, tag="LoadStat"):
    """What the server publishes of a rank when its load changes; later fields are ignored."""

    running: _Count
    waiting: _Count
    used_tokens: _Tokens
    max_tokens: int
    dp_rank: int
    waiting_uncached_tokens: _Tokens = 0


_LOAD_STAT = msgspec.msgpack.Decoder(LoadStat)


def read_load_stat(payload: bytes, engine: EngineDescription) -> tuple[int, LoadReport]:
    """Returns rank and load of a message of the server's sockets for load.

    Raises:
        MalformedMessage: it is none, or of an unknown rank.
    """
    try:
        stat = _LOAD_STAT.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedMessage(f"expected a LoadStat: {error}") from None
    if stat.dp_rank not in engine.ranks:
        raise MalformedMessage(f"expected one of the ranks {sorted(engine.ranks)}, received {stat.dp_rank}")
    report = _report(engine, stat.dp_rank, stat.running, stat.waiting, stat.used_tokens)
    report.prefill_tokens = stat.waiting_uncached_tokens
    return stat.dp_rank, report


def read_loads(page: Loads, engine: EngineDescription) -> tuple[dict[int, LoadReport], int]:
    """Returns the load of each rank, and how many entries were unusable."""
    loads = {}
    unusable = 0
    for entry in page.loads:
        try:
            load = msgspec.json.decode(entry, type=RankLoad)
        except (msgspec.DecodeError, RecursionError):
            unusable += 1
            continue
        if load.dp_rank not in engine.ranks:
            unusable += 1
            continue
        loads[load.dp_rank] = _report(
            engine, load.dp_rank, load.num_running_reqs, load.num_waiting_reqs, load.num_used_tokens
        )
        loads[load.dp_rank].prefill_tokens = load.num_waiting_uncached_tokens
    return loads, unusable


def read_metrics(page: bytes, engine: EngineDescription) -> tuple[dict[int, LoadReport], int]:
    """Returns the load of each rank that the metrics report completely, and how many values were unusable."""
    samples, unusable = read_samples(page, {_RUNNING, _WAITING, _USED})
    values: dict[int, dict[str, float]] = {}
    for sample in samples:
        rank = rank_of(sample, "dp_rank", engine.ranks)
        if rank is None or sample.value >= 1 << 31:
            unusable += 1
            continue
        values.setdefault(rank, {})[sample.name] = sample.value
    loads = {
        rank: _report(engine, rank, round(each[_RUNNING]), round(each[_WAITING]), round(each[_USED]))
        for rank, each in values.items()
        if len(each) == 3
    }
    return loads, unusable


def _report(engine: EngineDescription, rank: int, running: int, waiting: int, used_tokens: int) -> LoadReport:
    return LoadReport(
        running_requests=running,
        waiting_requests=waiting,
        active_blocks=-(-used_tokens // engine.block_size),
        total_blocks=engine.ranks[rank],
    )
