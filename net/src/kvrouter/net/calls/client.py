"""The client of one server's call stream: keeps it connected, and starts calls on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvrouter.net.calls.client_stream import ClientStream
from kvrouter.net.calls.counts import CallStreamCounts
from kvrouter.net.calls.errors import CallError, NotSent, ProtocolViolation
from kvrouter.net.calls.heartbeat_monitor import MISSES, HeartbeatMonitor
from kvrouter.net.calls.limits import VERSION, CallLimits
from kvrouter.net.calls.parsing import parse
from kvrouter.net.calls.running_call import ResponseReceiver, RunningCall
from kvrouter.net.calls.server import SERVICE
from kvrouter.net.grpc_connection import ConnectionLost, GrpcConnection, Http2Violation, Metadata
from kvrouter.net.logs import get_logger
from kvrouter.net.tls.tls import Tls
from kvrouter.v1.calls_pb2 import CallStreamClientHello, OpenCallStreamRequest, OpenCallStreamResponse
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

log = get_logger(__name__)

HEARTBEAT_TIMEOUT_SECONDS = 2.0
"""Silence after which a stream is given up: far above a round trip, far below a lease."""
_PATH = f"/{SERVICE}/OpenCallStream"
_LASTING_SECONDS = 1.0
"""A stream that lasted this long was healthy: it is opened again without a pause."""


class _NotOpened(Exception):
    """No lasting stream could be opened; the client tries again after a pause."""


class _Ended(Exception):
    """The stream has ended."""

    def __init__(self, reason: str, cause: str) -> None:
        super().__init__(cause)
        self.reason = reason


class CallStreamClient:
    """Calls of one server over one stream. ``run`` must be running."""

    def __init__(
        self,
        target: str,
        *,
        client_name: str,
        tls: Tls | None = None,
        role: str = "",
        metadata: Callable[[], Metadata] = tuple,
        limits: CallLimits | None = None,
        counts: CallStreamCounts | None = None,
        heartbeat_timeout_seconds: float = HEARTBEAT_TIMEOUT_SECONDS,
        ends_when_silent: bool = True,
    ) -> None:
        """Opens nothing yet.

        Args:
            target: Address of the server, host:port.
            client_name: Name of this client, for the server's logs.
            tls: Encrypts the connection and checks the server's certificate; None for plain text.
            role: What the server is, for the name in its certificate.
            metadata: Returns the metadata with which a stream is opened.
            limits: What is accepted and stored.
            counts: Counts of this and other clients; new ones by default.
            heartbeat_timeout_seconds: Silence after which the stream is given up, seconds.
            ends_when_silent: Whether that ends an open stream. If not, no heartbeats are sent: the calls wait for as
                long as the stream is connected, and the server keeps those of a client that was frozen.
        """
        self.counts = CallStreamCounts() if counts is None else counts
        self._target = target
        self._tls = tls
        self._role = role
        self._metadata = metadata
        self._client_name = client_name
        self._limits = CallLimits() if limits is None else limits
        self._heartbeat_timeout = heartbeat_timeout_seconds
        self._ends_when_silent = ends_when_silent
        self._stream: ClientStream | None = None
        self._failure = ""
        """Why the latest attempt to open a stream failed; empty while none has failed since the last open stream."""
        self._changed = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Whether a stream is open and takes calls."""
        return self._stream is not None and not self._stream.draining

    @property
    def running(self) -> int:
        """Number of calls that run or wait."""
        return 0 if self._stream is None else self._stream.running

    async def wait_ready(self) -> None:
        """Returns when a stream is open and takes calls."""
        while not self.ready:
            self._changed.clear()
            await self._changed.wait()

    async def wait_lost(self) -> None:
        """Returns when the open stream has ended or takes no new calls, and at once if there is none."""
        stream = self._stream
        while stream is not None and stream is self._stream and not stream.draining:
            self._changed.clear()
            await self._changed.wait()

    async def call(
        self,
        method: str,
        request: bytes,
        *,
        time_left: float | None = None,
        urgent: bool = False,
        trace_context: str = "",
    ) -> bytes:
        """Makes a unary call and returns the encoded response. Waits for a stream that is being opened.

        Args:
            method: Full name of the method, such as kvrouter.v1.IndexerService/FindMatches.
            request: The encoded request.
            time_left: Time for the call, seconds; None for no limit.
            urgent: Whether to send the call ahead of others that wait.
            trace_context: Trace context (W3C traceparent).

        Raises:
            NotSent: the server never ran the call.
            OutcomeUnknown: the stream ended before the answer.
            CallTimedOut: the call was not answered in time.
            CallRefused: the server answered with an error.
        """
        if not self.ready:
            time_left = await self.wait_open(time_left)
        answer = _Answer()
        running = self.start(method, request, answer, time_left=time_left, urgent=urgent, trace_context=trace_context)
        try:
            return await answer.future
        except asyncio.CancelledError:
            running.cancel()
            raise
        finally:
            del answer  # Its exception's traceback refers to this frame.

    def start(
        self,
        method: str,
        request: bytes,
        receiver: ResponseReceiver,
        *,
        time_left: float | None = None,
        urgent: bool = False,
        trace_context: str = "",
    ) -> RunningCall:
        """Starts a call. ``receiver`` is called from the loop that reads the stream; see ``call`` for the rest.

        Raises:
            NotSent: no stream is open, or the server does not accept the call.
        """
        stream = self._stream
        if stream is None:
            raise NotSent(f"no call stream to {self._target} is open: {self._failure or 'it is being opened'}")
        call = stream.start(method, request, receiver, time_left=time_left, urgent=urgent, trace_context=trace_context)
        if time_left is not None:
            call.timer = asyncio.get_running_loop().call_later(time_left, stream.time_out, call)
        return call

    async def run(self) -> None:
        """Keeps a stream open until cancelled."""
        while True:
            async for attempt in AsyncRetrying(
                wait=wait_random_exponential(multiplier=0.05, max=2), retry=retry_if_exception_type(_NotOpened)
            ):
                with attempt:
                    await self._keep_stream()

    async def wait_open(self, time_left: float | None = None) -> float | None:
        """Waits for a stream that is being opened. Returns the time left of that given.

        Raises:
            NotSent: no stream was opened.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(time_left):
                while not self.ready and not self._failure:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise NotSent(f"no call stream to {self._target} was opened in time") from None
        return None if time_left is None else max(0.0, time_left - (loop.time() - began))

    async def _keep_stream(self) -> None:
        """Opens a stream and keeps it until it ends.

        Raises:
            _NotOpened: it was not opened, or lasted only for a moment.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            await self._use_stream()
        except _Ended as ended:
            lasted = loop.time() - began >= _LASTING_SECONDS
            self._failure = "" if lasted else str(ended) or ended.reason
            self._changed.set()
            if not lasted:
                raise _NotOpened from None

    async def _use_stream(self) -> None:
        """Opens a stream and uses it until it ends.

        Raises:
            _Ended: always.
        """
        connection: GrpcConnection | None = None
        try:
            async with asyncio.timeout(self._heartbeat_timeout):
                connection = await self._connect()
                stream = await self._open(connection)
        except TimeoutError:
            raise _Ended("silent", f"no answer for {self._heartbeat_timeout:g} s") from None
        except (ConnectionLost, Http2Violation, ProtocolViolation) as error:
            ended = _end_of(error)
            if ended.reason != "lost":
                self.counts.ended[ended.reason] += 1
            raise ended from None
        else:
            await self._use(connection, stream)
        finally:
            if connection is not None:
                connection.close()

    async def _connect(self) -> GrpcConnection:
        return await GrpcConnection.open(
            self._target,
            _PATH,
            tls=self._tls,
            role=self._role,
            metadata=self._metadata(),
            max_message_bytes=self._limits.message_bytes,
        )

    async def _open(self, connection: GrpcConnection) -> ClientStream:
        hello = CallStreamClientHello(
            version=VERSION, client_name=self._client_name, max_message_bytes=self._limits.message_bytes
        )
        first = await connection.exchange(OpenCallStreamRequest(client_hello=hello).SerializeToString())
        message = parse(OpenCallStreamResponse, first, self._limits)
        stream = ClientStream(message.server_hello, self._limits, self.counts, connection.wake)

        def receive(encoded: bytes) -> None:
            stream.receive(encoded)
            if stream.draining:
                self._changed.set()

        connection.start(receive, stream.next_message)
        return stream

    async def _use(self, connection: GrpcConnection, stream: ClientStream) -> None:
        """Uses a stream until it ends.

        Raises:
            _Ended: always.
        """
        self._stream, self._failure = stream, ""
        self._changed.set()
        self.counts.opened += 1
        self.counts.streams += 1
        log.info("call_stream.opened", server=self._target)
        ended = _Ended("closed", "the client was closed")
        watching = asyncio.create_task(self._end_when_silent(connection, stream), name="call-stream-heartbeats")
        try:
            await connection.wait_ended()
        except (ConnectionLost, Http2Violation, ProtocolViolation, _Ended) as error:
            ended = _Ended("draining", "the server has stopped") if stream.draining else _end_of(error)
        finally:
            watching.cancel()
            self._stream = None
            self._changed.set()
            self.counts.streams -= 1
            self.counts.ended[ended.reason] += 1
            stream.lose(str(ended))
            log.info("call_stream.ended", server=self._target, reason=ended.reason, cause=str(ended))
            await asyncio.wait({watching})
        raise ended

    async def _end_when_silent(self, connection: GrpcConnection, stream: ClientStream) -> None:
        if not self._ends_when_silent:
            return
        monitor = HeartbeatMonitor()
        while not monitor.silent:
            await asyncio.sleep(self._heartbeat_timeout / MISSES)
            if stream.heard:
                monitor.heard()
            stream.heard = False
            monitor.tick()
            stream.ping()
        connection.end(_Ended("silent", f"no answer for {self._heartbeat_timeout:g} s"))


def _end_of(error: Exception) -> _Ended:
    """Returns how a stream ended that an error has ended."""
    if isinstance(error, _Ended):
        return error
    if isinstance(error, ConnectionLost):
        return _Ended("lost", str(error))
    reason = error.reason if isinstance(error, Http2Violation | ProtocolViolation) else "lost"
    log.warning("call_stream.violated", reason=reason, cause=str(error))
    return _Ended(reason, str(error))


class _Answer:
    """Receives the response of a unary call."""

    __slots__ = ("_response", "future")

    def __init__(self) -> None:
        self.future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._response = b""

    def on_response(self, encoded: bytes) -> None:
        self._response = encoded

    def on_end(self) -> None:
        if not self.future.done():
            self.future.set_result(self._response)

    def on_error(self, error: CallError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
