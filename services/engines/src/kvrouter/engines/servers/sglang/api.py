"""The HTTP API of one SGLang server, and its load."""

from __future__ import annotations

from typing import Annotated

import msgspec
from kvrouter.engines.events.zmq_frames import MalformedMessage
from kvrouter.engines.servers.api import EngineCall, EngineState
from kvrouter.engines.servers.description import Discovered, EngineDescription, Models
from kvrouter.engines.servers.http import EngineHttp, UnexpectedAnswer, as_json
from kvrouter.engines.servers.metrics_text import MOST_COUNTED, read_values
from kvrouter.engines.servers.sglang import discovery, requests
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.worker_pb2 import WorkerServiceGenerateRequest

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
    most = dict.fromkeys((_RUNNING, _WAITING, _USED), MOST_COUNTED)
    values, unusable = read_values(page, most, "dp_rank", engine.ranks)
    loads = {
        rank: _report(engine, rank, round(each[_RUNNING]), round(each[_WAITING]), round(each[_USED]))
        for rank, each in values.items()
    }
    return loads, unusable


def _report(engine: EngineDescription, rank: int, running: int, waiting: int, used_tokens: int) -> LoadReport:
    return LoadReport(
        running_requests=running,
        waiting_requests=waiting,
        active_blocks=-(-used_tokens // engine.block_size),
        total_blocks=engine.ranks[rank],
    )


class SglangApi:
    """Implements EngineApi."""

    def __init__(self, http: EngineHttp) -> None:
        self._http = http

    async def discover(self) -> Discovered:
        """Returns what the server says of itself."""
        return await discovery.discover(self._http)

    async def state(self) -> EngineState:
        """Returns the adapters that are loaded."""
        return EngineState((await self._http.get_as("/v1/models", Models)).lora_names)

    async def loads(self, engine: EngineDescription) -> tuple[dict[int, LoadReport], int]:
        """Returns the load of each rank; from the server's metrics if it is too old to report it as JSON."""
        try:
            return read_loads(await self._http.get_as("/v1/loads?include=core", Loads), engine)
        except UnexpectedAnswer as error:
            if error.status != 404:
                raise
        return read_metrics(await self._http.get("/metrics"), engine)

    def read_pushed_load(self, payload: bytes, engine: EngineDescription) -> tuple[int, LoadReport]:
        """Returns rank and load of a LoadStat.

        Raises:
            MalformedMessage: the message is none.
        """
        return read_load_stat(payload, engine)

    def call(self, request: WorkerServiceGenerateRequest, engine: EngineDescription) -> EngineCall:
        """Returns a request as one to generate."""
        return requests.call(request, engine)

    async def abort(self, engine_id: str) -> None:
        """Aborts a request. SGLang would notice a closed connection, too, but later."""
        await self._http.command("/abort_request", as_json({"rid": engine_id}))
