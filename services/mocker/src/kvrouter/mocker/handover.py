"""Hands prompts over from prefill to decode workers, with a modelled transfer time.

Nothing is transferred but the time that it takes. In the sequential style, a prefill worker keeps the blocks of a
prompt that it has computed, and says where they are; the decode worker fetches them once, or their lease ends. In the
concurrent style both meet in a bootstrap room (``kvrouter.mocker.rooms``), and the prompt is computed once both are
there.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import structlog
from aiohttp import web
from kvrouter.engines.fields import SGLANG_TRANSFER
from kvrouter.mocker.rooms import PrefillRooms, await_prefill
from kvrouter.mocker.serving.errors import ApiError
from kvrouter.publisher.serving.outputs import RequestOutput
from kvrouter.runtime.http_server import HttpLimits, serving_http
from kvrouter.runtime.kv_transfer import KvTransfer
from kvrouter.v1.common_pb2 import Stage
from kvrouter.v1.worker_pb2 import FinishReason, GenerateOutput, TransferParams, WorkerServiceGenerateRequest
from prometheus_client import CollectorRegistry, Gauge

log = structlog.get_logger(component="mocker")

FORMAT = "mock-json"
"""Format of the parameters of the sequential style: a JSON object with address, request_id and tokens."""
_PULL_SECONDS = 30.0
_MAX_CONNECTIONS = 4096
_HEADER_SECONDS = 10.0

Start = Callable[[], None]
Fail = Callable[[str], None]


class Handover:
    """The prompts that one worker hands over or receives. ``serving`` must be running."""

    def __init__(
        self,
        *,
        block_size: int,
        transfer: KvTransfer,
        lease_seconds: float,
        concurrent: bool,
        clock_factor: float,
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Sets up without serving.

        Args:
            block_size: Tokens per block.
            transfer: Time of a transfer, in engine time.
            lease_seconds: Time for which the blocks of a prompt are kept for a decode worker, in seconds.
            concurrent: Whether decode workers meet this prefill worker in bootstrap rooms.
            clock_factor: Engine seconds that pass in one second.
            registry: Registry for the metrics.
            clock: Returns the time in seconds.
        """
        self.address = ""
        """Address at which decode workers reach this worker, host:port, once it serves."""
        self._block_size = block_size
        self._transfer = transfer
        self._lease_seconds = lease_seconds
        self._rooms = PrefillRooms() if concurrent else None
        self._clock_factor = clock_factor
        self._registry = registry
        self._clock = clock
        self._prefills: dict[str, int] = {}
        """Prompt tokens of the prefills under way, by engine id."""
        self._kept: dict[str, tuple[int, float]] = {}
        """Blocks kept for a decode worker, and the end of their lease, by engine id."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._computed: dict[str, asyncio.Event] = {}
        self._session: aiohttp.ClientSession | None = None
        kept = Gauge("kvrouter_mocker_kept_blocks", "Blocks kept for decode workers.", registry=registry)
        kept.set_function(lambda: self.kept_blocks)

    @property
    def kept_blocks(self) -> int:
        """Number of blocks that are kept for decode workers."""
        now = self._clock()
        self._kept = {each: kept for each, kept in self._kept.items() if kept[1] > now}
        return sum(blocks for blocks, _ in self._kept.values())

    @asynccontextmanager
    async def serving(self, host: str, advertised: str) -> AsyncIterator[None]:
        """Serves blocks and rooms on a free port of a host while the context lasts; others reach it as ``advertised``.

        Raises:
            BindFailed: the address cannot be listened on.
        """
        async with AsyncExitStack() as stack:
            self._session = await stack.enter_async_context(
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PULL_SECONDS))
            )
            if self._rooms is not None:
                port = await stack.enter_async_context(self._rooms.serving(host, 0, self._registry))
            else:
                application = web.Application()
                application.add_routes([web.delete("/blocks/{request_id}", self._hand_over)])
                limits = HttpLimits(_MAX_CONNECTIONS, _HEADER_SECONDS)
                serving = serving_http(
                    application, host, 0, limits, self._registry, name="mocker_blocks", shutdown_timeout=1.0
                )
                _, port = await stack.enter_async_context(serving)
            self.address = f"{advertised}:{port}"
            try:
                yield
            finally:
                tasks = list(self._tasks.values())
                for task in tasks:
                    task.cancel()
                if tasks:
                    await asyncio.wait(tasks)

    def concerns(self, request: WorkerServiceGenerateRequest) -> bool:
        """Returns whether a request is handed over."""
        return request.stage == Stage.STAGE_PREFILL or "transfer_params" in request

    def submit(self, request: WorkerServiceGenerateRequest, start: Start, fail: Fail) -> None:
        """Starts a request at the engine when its turn has come.

        Args:
            request: The request.
            start: Starts it at the engine.
            fail: Ends it as failed, with what has happened.
        """
        request_id, tokens = request.request_id, len(request.token_ids)
        if request.stage != Stage.STAGE_PREFILL:
            self._run(request_id, self._receive(request.transfer_params, tokens, start), fail)
            return
        if "transfer_params" not in request:
            start()
            self._prefills[request_id] = tokens
        else:
            self._run(request_id, self._meet(request_id, request.transfer_params, start), fail)

    def finish(self, output: RequestOutput) -> None:
        """Adds to the last output of a prefill where its blocks are."""
        if not output.finish_reason:
            return
        if (computed := self._computed.get(output.request_id)) is not None:
            computed.set()
        tokens = self._prefills.pop(output.request_id, None)
        if tokens is None or output.finish_reason == FinishReason.FINISH_REASON_ABORT:
            return
        blocks = -(-tokens // self._block_size)
        self._kept[output.request_id] = (blocks, self._clock() + self._lease_seconds)
        payload = {"address": self.address, "request_id": output.request_id, "tokens": tokens}
        output.details = output.details or GenerateOutput()
        output.details.transfer_params.CopyFrom(TransferParams(format=FORMAT, payload=json.dumps(payload).encode()))

    def abort(self, request_id: str) -> bool:
        """Ends a hand-over, by the id of the request or of one of its attempts. Returns whether it was known."""
        names = [each for each in self._kept if each == request_id or each.startswith(f"{request_id}.")]
        for name in names:
            del self._kept[name]
        self._prefills.pop(request_id, None)
        task = self._tasks.get(request_id)
        if task is not None:
            task.cancel()
        return bool(names) or task is not None

    def _run(self, request_id: str, handing_over: Coroutine[None, None, None], fail: Fail) -> None:
        task = asyncio.create_task(handing_over, name=f"handover {request_id}")
        self._tasks[request_id] = task

        def ended(task: asyncio.Task[None]) -> None:
            del self._tasks[request_id]
            if not task.cancelled() and (error := task.exception()) is not None:
                if not isinstance(error, ApiError | aiohttp.ClientError | TimeoutError):
                    log.error("handover.failed", request_id=request_id, exc_info=error)
                fail(f"KV load failure: {error}")

        task.add_done_callback(ended)

    async def _meet(self, request_id: str, params: TransferParams, start: Start) -> None:
        """Computes a prompt once its decode worker is in the room."""
        if self._rooms is None:
            raise ApiError(400, "expected no transfer parameters in a prefill without bootstrap rooms")
        room = _read(params, SGLANG_TRANSFER)["bootstrap_room"]
        computed = self._computed[request_id] = asyncio.Event()
        try:
            async with self._rooms.prefill(int(room)):
                start()
                await computed.wait()
        finally:
            del self._computed[request_id]

    async def _receive(self, params: TransferParams, tokens: int, start: Start) -> None:
        """Starts a request when its blocks have arrived."""
        if params.format == SGLANG_TRANSFER:
            room = _read(params, SGLANG_TRANSFER)
            await await_prefill(room["bootstrap_host"], room["bootstrap_port"], room["bootstrap_room"])
        else:
            blocks = _read(params, FORMAT)
            url = f"http://{blocks['address']}/blocks/{blocks['request_id']}"
            assert self._session is not None  # noqa: S101 - it is serving
            async with self._session.delete(url) as response:
                if response.status != 200:
                    raise ApiError(500, f"{url} answered {response.status}")
        await asyncio.sleep(self._transfer.ms(tokens) / 1e3 / self._clock_factor)
        start()

    async def _hand_over(self, request: web.Request) -> web.Response:
        """Gives the blocks of a prompt away: returns 200, or 404 if there are none."""
        _, expiry = self._kept.pop(request.match_info["request_id"], (0, 0.0))
        return web.Response(status=200 if expiry > self._clock() else 404)


def _read(params: TransferParams, expected: str) -> dict[str, Any]:
    if params.format != expected:
        raise ApiError(400, f"expected transfer parameters in the format {expected}, received {params.format!r:.64}")
    try:
        read = json.loads(params.payload)
        return {name: read[name] for name in _KEYS[expected]}
    except (ValueError, TypeError, KeyError) as error:
        raise ApiError(400, f"expected a JSON object with {', '.join(_KEYS[expected])}: {error!r}") from None


_KEYS = {FORMAT: ("address", "request_id"), SGLANG_TRANSFER: ("bootstrap_host", "bootstrap_port", "bootstrap_room")}
