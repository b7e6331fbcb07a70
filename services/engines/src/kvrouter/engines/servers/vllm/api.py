"""The HTTP API of one vLLM server."""

from __future__ import annotations

import msgspec
from kvrouter.engines.events.zmq_messages import MalformedMessage
from kvrouter.engines.servers.api import EngineCall, EngineState
from kvrouter.engines.servers.description import Discovered, EngineDescription
from kvrouter.engines.servers.http import EngineHttp, UnexpectedAnswer
from kvrouter.engines.servers.models import Models
from kvrouter.engines.servers.vllm import discovery, load, requests
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
        return load.read_loads(await self._http.get("/metrics"), engine.ranks)

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
