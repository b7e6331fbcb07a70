"""The HTTP API of one SGLang server."""

from __future__ import annotations

from kvrouter.engines.servers.api import EngineCall, EngineState
from kvrouter.engines.servers.description import Discovered, EngineDescription
from kvrouter.engines.servers.http import EngineHttp, UnexpectedAnswer, as_json
from kvrouter.engines.servers.models import Models
from kvrouter.engines.servers.sglang import discovery, load, requests
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.worker_pb2 import WorkerServiceGenerateRequest


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
            return load.read_loads(await self._http.get_as("/v1/loads?include=core", load.Loads), engine)
        except UnexpectedAnswer as error:
            if error.status != 404:
                raise
        return load.read_metrics(await self._http.get("/metrics"), engine)

    def read_pushed_load(self, payload: bytes, engine: EngineDescription) -> tuple[int, LoadReport]:
        """Returns rank and load of a LoadStat.

        Raises:
            MalformedMessage: the message is none.
        """
        return load.read_load_stat(payload, engine)

    def call(self, request: WorkerServiceGenerateRequest, engine: EngineDescription) -> EngineCall:
        """Returns a request as one to generate."""
        return requests.call(request, engine)

    async def abort(self, engine_id: str) -> None:
        """Aborts a request. SGLang would notice a closed connection, too, but later."""
        await self._http.command("/abort_request", as_json({"rid": engine_id}))
