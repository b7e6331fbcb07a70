"""A registered worker whose answers a test writes itself: any bytes, any status, or none at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2
from kvrouter.net.calls import SERVICE as CALL_STREAMS, CallStreamServer, ServerCall
from kvrouter.net.etcd import connect
from kvrouter.net.rpc.call_gate import CallGate
from kvrouter.net.rpc.loop_server import LoopServer
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.v1 import worker_pb2
from kvrouter.v1.error_encoding import STATUS_KEY, from_parts, set_error
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.errors_pb2 import ErrorInfo
from kvrouter.v1.registry_pb2 import WorkerRegistration
from kvrouter.v1.worker_pb2 import FinishReason, GenerateOutput, WorkerServiceGenerateResponse

_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name

Context = Any
Behaviour = Callable[[Context], Awaitable[None]]
"""Answers one Generate call."""


def piece(*token_ids: int, finish: FinishReason = FinishReason.FINISH_REASON_UNSPECIFIED) -> bytes:
    output = GenerateOutput(token_ids=token_ids, finish_reason=finish)
    return WorkerServiceGenerateResponse(output=output).SerializeToString()


async def answers(context: Context) -> None:
    """Serves the request as it should be."""
    for token in range(3):
        await context.write(piece(token))
    await context.write(piece(3, finish=FinishReason.FINISH_REASON_LENGTH))


async def hangs(context: Context) -> None:
    """Never answers."""
    await asyncio.Event().wait()


def aborts(code: grpc.StatusCode) -> Behaviour:
    async def behave(context: Context) -> None:
        # Not by abort: gRPC keeps the exception that it raises, and the request with it.
        context.set_code(code)
        context.set_details("as the test has it")

    return behave


def refuses(error: KvRouterError) -> Behaviour:
    """Refuses the request with an error and its details."""

    async def behave(context: Context) -> None:
        set_error(context, error)

    return behave


def writes(*pieces: bytes) -> Behaviour:
    """Sends these and ends the call with OK."""

    async def behave(context: Context) -> None:
        for each in pieces:
            await context.write(each)

    return behave


_WRITE_BUFFER_BYTES = 1 << 20


class _StreamContext:
    """A call on a call stream, as a behaviour sees it."""

    def __init__(self, call: ServerCall) -> None:
        self.call = call
        self.code = grpc.StatusCode.OK
        self.details = ""
        self.info: ErrorInfo | None = None

    async def write(self, response: bytes) -> None:
        """Sends a response. Waits for the stream, as gRPC does."""
        self.call.respond(response)
        while self.call.unread_bytes > _WRITE_BUFFER_BYTES and not self.call.ended:
            await asyncio.sleep(0)

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        """Keeps the details of an error, which a call stream sends as they are."""
        for key, value in metadata:
            if key == STATUS_KEY and isinstance(value, bytes):
                self.info = ErrorInfo()
                Status.FromString(value).details[0].Unpack(self.info)


class FreezableStreams(CallStreamServer):
    """Call streams that are neither opened nor answered while they are frozen."""

    def __init__(self, answering: asyncio.Event) -> None:
        super().__init__()
        self._answering = answering

    async def _serve(self, requests: object, context: Context) -> None:
        await self._answering.wait()
        await super()._serve(requests, context)

    def freeze(self) -> None:
        for connection in self._connections:
            connection._context._next_message = lambda: None

    def thaw(self) -> None:
        for connection in self._connections:
            connection._context._next_message = connection.stream.next_message
            connection._context.wake()


class HostileWorker:
    """``behave`` answers each Generate call; while it is frozen, probes get no answer, as from a stopped loop."""

    def __init__(self, behave: Behaviour, *, call_streams: bool = False) -> None:
        """With ``call_streams``, it serves Generate on call streams too."""
        self._answering = asyncio.Event()
        self._answering.set()
        self.call_streams = FreezableStreams(self._answering) if call_streams else None
        self._behaving: set[asyncio.Task[None]] = set()
        self.behave = behave
        self.endpoint = ""
        self.calls = 0
        self.under_way = 0

    def freeze(self) -> None:
        self._answering.clear()
        if self.call_streams is not None:
            self.call_streams.freeze()

    def thaw(self) -> None:
        self._answering.set()
        if self.call_streams is not None:
            self.call_streams.thaw()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[HostileWorker]:
        server = LoopServer(CallGate())
        handler = grpc.unary_stream_rpc_method_handler(self._generate)
        server.add_registered_method_handlers(_SERVICE, {"Generate": handler})
        check = grpc.unary_unary_rpc_method_handler(self._check)
        server.add_registered_method_handlers(_HEALTH, {"Check": check})
        if self.call_streams is not None:
            self.call_streams.add_streaming(f"{_SERVICE}/Generate", self._generate_on_stream)
            server.add_registered_method_handlers(CALL_STREAMS, self.call_streams.handlers())
        self.endpoint = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
        try:
            yield self
        finally:
            await server.stop(0)
            for behaving in self._behaving:
                behaving.cancel()
            if self._behaving:
                await asyncio.wait(self._behaving)

    async def _check(self, request: bytes, context: Context) -> bytes:
        await self._answering.wait()
        answer = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
        return answer.SerializeToString()

    def _generate_on_stream(self, request: bytes, call: ServerCall) -> None:
        behaving = asyncio.create_task(self._answer(_StreamContext(call)))
        self._behaving.add(behaving)
        behaving.add_done_callback(self._behaving.discard)
        call.on_cancelled = lambda: _cancel(behaving)

    async def _answer(self, context: _StreamContext) -> None:
        await self._generate(b"", context)
        if context.code is grpc.StatusCode.OK:
            context.call.end()
        else:
            context.call.fail(from_parts(context.code.value[0], context.details, context.info))

    async def _generate(self, request: bytes, context: Context) -> None:
        self.calls += 1
        self.under_way += 1
        try:
            await self.behave(context)
        finally:
            self.under_way -= 1


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


@asynccontextmanager
async def registered_beside(
    view: ComponentView, etcd_endpoint: str, worker_id: int, endpoint: str, *, call_streams: bool = False
) -> AsyncIterator[None]:
    """Registers an address as a worker like those of a component, which must have one, while the context lasts."""
    registration = WorkerRegistration()
    registration.CopyFrom(next(iter(view.workers.values())))
    registration.worker_id, registration.endpoint = worker_id, endpoint
    registration.serves_call_stream = call_streams
    key = view.name.worker_key(worker_id).encode()
    async with connect(etcd_endpoint) as etcd:
        await etcd.put(key, registration.SerializeToString())
        try:
            yield
        finally:
            await etcd.delete(key)
