"""The HTTP API of one vLLM server."""

from __future__ import annotations

from kvrouter.publisher.adapters.zmq_messages import MalformedMessage
from kvrouter.sidecar.engines.api import EngineCall
from kvrouter.sidecar.engines.description import Discovered, EngineDescription
from kvrouter.sidecar.engines.http import EngineHttp
from kvrouter.sidecar.engines.vllm import discovery, load, requests
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.worker_pb2 import WorkerServiceGenerateRequest


class VllmApi:
    """Implements EngineApi."""

    def __init__(self, http: EngineHttp) -> None:
        self._http = http

    async def discover(self) -> Discovered:
        """Returns what the server says of itself."""
        return await discovery.discover(self._http)

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
