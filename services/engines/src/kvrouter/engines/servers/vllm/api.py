"""The HTTP API of one vLLM server, and its load by its metrics."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from kvrouter.engines.events.zmq_frames import MalformedMessage
from kvrouter.engines.servers.api import EngineCall, EngineState
from kvrouter.engines.servers.description import Discovered, EngineDescription, Models
from kvrouter.engines.servers.http import EngineHttp, UnexpectedAnswer
from kvrouter.engines.servers.metrics_text import MOST_COUNTED, read_values
from kvrouter.engines.servers.vllm import discovery, requests
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.worker_pb2 import WorkerServiceGenerateRequest


class Sleeping(msgspec.Struct):
    """The page ``/is_sleeping``."""

    is_sleeping: bool


class VllmApi:
    """Implements EngineApi."""

    def __init__(self, http: EngineHttp) -> None:
        self._http = http
        self._can_sleep = True

    async def discover(self) -> Discovered:
        """Returns what the server says of itself."""
        return await discovery.discover(self._http)

    async def state(self) -> EngineState:
        """Returns the adapters that are loaded, and whether the server sleeps.

        A server that can be put to sleep says so at ``/is_sleeping``, which it has with VLLM_SERVER_DEV_MODE=1 only.
        """
        models = await self._http.get_as("/v1/models", Models)
        return EngineState(models.lora_names, is_asleep=self._can_sleep and await self._sleeps())

    async def _sleeps(self) -> bool:
        try:
            return (await self._http.get_as("/is_sleeping", Sleeping)).is_sleeping
        except UnexpectedAnswer:
            self._can_sleep = False
            return False

    async def loads(self, engine: EngineDescription) -> tuple[dict[int, LoadReport], int]:
        """Returns the load of each rank, from the server's metrics."""
        return read_loads(await self._http.get("/metrics"), engine.ranks)

    def read_pushed_load(self, payload: bytes, engine: EngineDescription) -> tuple[int, LoadReport]:  # noqa: ARG002
        """Refuses the message: vLLM publishes no load.

        Raises:
            MalformedMessage: always.
        """
        raise MalformedMessage("vLLM publishes no load")

    def call(self, request: WorkerServiceGenerateRequest, engine: EngineDescription) -> EngineCall:
        """Returns a request as a completion."""
        return requests.call(request, engine)

    async def abort(self, engine_id: str) -> None:
        """Does nothing: vLLM aborts a request whose connection is closed."""


_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_USAGE = "vllm:kv_cache_usage_perc"


def read_loads(page: bytes, ranks: Mapping[int, int | None]) -> tuple[dict[int, LoadReport], int]:
    """Returns the load of each rank that reports it completely, and how many values were unusable.

    ``ranks`` has each rank's KV blocks. The usage is that of running requests: cached blocks count as free.
    """
    most = {_RUNNING: MOST_COUNTED, _WAITING: MOST_COUNTED, _USAGE: 1.0}
    values, unusable = read_values(page, most, "engine", ranks)
    loads = {
        rank: LoadReport(
            running_requests=round(each[_RUNNING]),
            waiting_requests=round(each[_WAITING]),
            active_blocks=round(each[_USAGE] * (ranks[rank] or 0)),
            total_blocks=ranks[rank],
        )
        for rank, each in values.items()
    }
    return loads, unusable
