"""The connections to one worker: a channel for ordinary calls, and a call stream if the worker serves one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from enum import Enum
from functools import cached_property
from typing import Any, Protocol, cast

import grpc.aio
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvrouter.core import TokenWriter
from kvrouter.frontend.workers.attempt import RunningCall
from kvrouter.net import trace_context
from kvrouter.net.calls import CallStreamCounts, NotSent, OutcomeUnknown
from kvrouter.net.tls import Tls
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import call_stream_client, open_channel, remote
from kvrouter.v1 import worker_pb2
from kvrouter.v1.errors import DependencyAway, KvRouterError
from kvrouter.v1.worker_pb2 import AbortRequest, AbortResponse

log = structlog.get_logger(component="frontend")

_DESCRIPTOR = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
_GENERATE = f"{_DESCRIPTOR.full_name}/Generate"
_PROBE_SECONDS = 30.0
"""Timeout of one probe call, seconds. A worker is suspected long before; a lost call is made again."""
_PING_SECONDS = 1.0
"""Time after which an unanswered ping is followed by a probe call, which notices lost connections, seconds."""
_ABORT_SECONDS = 1.0
"""Timeout of an abort, which delays the retry of its request, seconds. A worker that is gone refuses it at once."""
_LOSS_SECONDS = 0.5
"""Longest time between the failure of a call and the report that its connection was lost, seconds."""
_NO_ANSWER = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN}
)
"""Codes that gRPC may generate without any answer from the worker. Any other code comes from its event loop."""
_CONNECTING = frozenset({grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING})


class Probe(Enum):
    """Result of a probe."""

    ANSWERED = "answered"
    UNREACHABLE = "unreachable"
    """There is no connection: the process or its machine is gone, or restarts."""
    SILENT = "silent"
    """There was no answer in time."""


class ResponseReceiver(Protocol):
    """Receives the responses of one call. Its methods are called from the connection's reader and must not block."""

    def on_response(self, encoded: bytes) -> TokenWriter | None:
        """Receives an encoded response. May return a writer, to which the following ones are offered first."""

    def on_end(self) -> None:
        """Receives the end of a call that succeeded."""

    def on_error(self, error: Exception) -> None:
        """Receives the error of a call that failed: KvRouterError, unless this process is at fault."""


class _Stub(Protocol):
    def generate(self, request: bytes, *, deadline: Deadline) -> AsyncGenerator[bytes, None]: ...

    async def abort(self, request: AbortRequest, *, deadline: Deadline) -> AbortResponse: ...


class WorkerConnection:
    """The connection to the worker at one address."""

    def __init__(self, endpoint: str, client_name: str, counts: CallStreamCounts, tls: Tls | None = None) -> None:
        self._endpoint = endpoint
        self._tls = tls
        # Probes decide whether a worker that is silent is suspected; its requests may wait for it to go on.
        self._stream = call_stream_client(
            endpoint, client_name=client_name, tls=tls, role="worker", counts=counts, ends_when_silent=False
        )
        self.ping = self._stream.ping
        """Pings the worker's event loop on its open call stream; see ``CallStreamClient.ping``."""
        self._streaming: asyncio.Task[None] | None = None
        self._reading: set[asyncio.Task[None]] = set()
        self._pending = 0

    @cached_property
    def _channel(self) -> grpc.aio.Channel:
        return open_channel(self._endpoint, tls=self._tls, role="worker")

    @cached_property
    def _stub(self) -> _Stub:
        return cast(_Stub, remote(_DESCRIPTOR, self._channel, raw_responses=frozenset({"Generate"})))

    @cached_property
    def _health(self) -> Any:
        return health_pb2_grpc.HealthStub(self._channel)

    @property
    def idle(self) -> bool:
        """Whether no call runs."""
        return not self._pending and not self._reading and not self._stream.running

    @property
    def is_connected(self) -> bool:
        """Whether the worker can be called without connecting to it first."""
        return self._stream.ready or self._is_channel_ready

    @property
    def _is_channel_ready(self) -> bool:
        return self._has_channel and self._channel.get_state() is grpc.ChannelConnectivity.READY

    @property
    def _has_channel(self) -> bool:
        """Whether the channel was used: a worker with a call stream rarely needs it."""
        return "_channel" in self.__dict__

    def open_stream(self) -> None:
        """Opens a call stream and keeps it open. Calls use it once it is open."""
        if self._streaming is None:
            self._streaming = asyncio.create_task(
                self._stream.run(), name="worker-call-stream", context=trace_context.background()
            )

    def generate(self, request: bytes, receiver: ResponseReceiver, *, deadline: Deadline) -> RunningCall:
        """Calls Generate with an encoded request; on the call stream if it is open."""
        try:
            return self._stream.start(
                _GENERATE, request, receiver, time_left=deadline.remaining(), trace_context=trace_context.current()
            )
        except NotSent:
            pass  # Made as an ordinary call, which says why if the worker takes none.
        reading = asyncio.create_task(self._read(request, receiver, deadline))
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)
        return reading

    async def abort(self, request_id: str) -> bool:
        """Aborts a request. Returns whether the worker could be reached soon."""
        self._pending += 1
        try:
            await self._stub.abort(AbortRequest(request_ids=[request_id]), deadline=Deadline.after(_ABORT_SECONDS))
        except KvRouterError as error:
            return error.code not in _NO_ANSWER
        else:
            return True
        finally:
            self._pending -= 1

    async def probe(self) -> Probe:
        """Checks the worker's health, by a ping on its call stream if it answers such.

        Any answer counts, even of a draining worker or of one without grpc.health.
        """
        self._pending += 1
        request = health_pb2.HealthCheckRequest(service=_DESCRIPTOR.full_name)
        answers: bool | None = None
        try:
            if self._streaming is not None and (answers := await self._answers_ping()):
                return Probe.ANSWERED
            await self._health.Check(request, timeout=_PROBE_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                if answers is False and self._stream.running and not self._stream.ready:
                    return Probe.SILENT  # It is shutting down, and the stream of its running calls is still open.
                log.debug("worker.probe_broken", endpoint=self._endpoint, cause=error.details())
                return Probe.UNREACHABLE
            return Probe.SILENT if error.code() in _NO_ANSWER else Probe.ANSWERED
        finally:
            self._pending -= 1
        return Probe.ANSWERED

    async def _is_ping_answered(self) -> bool:
        pong = self.ping()
        return pong is not None and await asyncio.shield(pong)

    async def _answers_ping(self) -> bool | None:
        """Returns whether a ping was answered in time; None if the worker cannot be asked this way."""
        try:
            async with asyncio.timeout(_PING_SECONDS):
                # A server that shuts down answers on the stream of its running calls, and accepts no new one.
                if await self._is_ping_answered():
                    return True
                await self._stream.wait_open()
                return await self._is_ping_answered() or None
        except NotSent:
            return None
        except TimeoutError:
            return False

    async def close(self) -> None:
        """Cancels running calls and closes the connection."""
        for reading in self._reading:
            reading.cancel()
        if self._reading:
            await asyncio.wait(self._reading)
        if self._streaming is not None:
            self._streaming.cancel()
            await asyncio.wait({self._streaming})
        if self._has_channel:
            await self._channel.close()

    async def _read(self, request: bytes, receiver: ResponseReceiver, deadline: Deadline) -> None:
        try:
            await self._wait_connected(deadline)
            responses = self._stub.generate(request, deadline=deadline)
            del request  # gRPC keeps it for as long as it needs it.
            async with aclosing(responses):
                async for response in responses:
                    receiver.on_response(response)
            receiver.on_end()
        except DependencyAway as error:
            known = isinstance(error, NotSent) or await self._stays_connected(error)
            receiver.on_error(error if known else OutcomeUnknown(error.message))
        except Exception as error:
            receiver.on_error(error)

    async def _stays_connected(self, error: DependencyAway) -> bool:
        """Returns whether a call failed by an answer of its worker, and not since the connection was lost."""
        if not self._is_channel_ready:
            return False
        if error.info.reason:
            return True  # Of the worker: gRPC gives no reasons.
        # gRPC may report the call before the connection that it was lost with.
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOSS_SECONDS):
                await self._channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
            return False
        return True

    async def _wait_connected(self, deadline: Deadline) -> None:
        """Waits for the connection before gRPC gets the request: after that nobody knows whether it was sent.

        Raises:
            NotSent: the worker cannot be connected to.
        """
        channel = self._channel
        try:
            async with asyncio.timeout(deadline.remaining()):
                while (state := channel.get_state(try_to_connect=True)) in _CONNECTING:
                    await channel.wait_for_state_change(state)
        except TimeoutError:
            return  # The call fails by its deadline.
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            raise NotSent("the worker cannot be connected to")
