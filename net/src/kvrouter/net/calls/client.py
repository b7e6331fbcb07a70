"""The client of one server's call stream: keeps it connected, and starts calls on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvrouter.net.backoff import Backoff
from kvrouter.net.calls.client_connection import ClientConnection, StreamEnded
from kvrouter.net.calls.errors import NotSent
from kvrouter.net.calls.limits import CallLimits, CallStreamCounts
from kvrouter.net.calls.running_call import ResponseReceiver, RunningCall
from kvrouter.net.http2 import Metadata
from kvrouter.net.logs import get_logger
from kvrouter.net.tls.tls import Tls
from kvrouter.v1.errors import KvRouterError

log = get_logger(__name__)

HEARTBEAT_TIMEOUT_SECONDS = 2.0
"""Silence after which a stream is given up: far above a round trip, far below a lease."""
_LASTING_SECONDS = 1.0
"""A healthy stream lasts this long: it is opened again without a pause."""

_RETRY_SECONDS = (0.05, 2.0)
"""First and longest pause after an attempt that opened no lasting stream, seconds."""
_MAX_RETIRED = 8
"""Streams finishing their calls while another one takes the new ones. Beyond, the oldest is closed."""


class _NotOpened(Exception):
    """No lasting stream could be opened; the client tries again after a pause."""


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
            role: Role of the server, for the name in its certificate.
            metadata: Returns the metadata with which a stream is opened.
            limits: Bounds of memory and messages.
            counts: Counts of this and other clients; new ones by default.
            heartbeat_timeout_seconds: Silence after which the stream is given up, seconds.
            ends_when_silent: Whether silence ends an open stream. If not, no heartbeats are sent: the calls wait for as
                long as the stream is connected, and the server keeps those of a frozen client. Probes tell whether
                the server answers.
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
        self._latest: ClientConnection | None = None
        """The stream for new calls, while it is open."""
        self._retired: list[ClientConnection] = []
        """Streams finishing their calls without new ones, the oldest first."""
        self._reported: set[str] = set()
        """Violations logged, so repetitions fill no log."""
        self._failure = ""
        """Why the latest attempt to open a stream failed; empty while none has failed since the last open stream."""
        self._changed = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Whether a stream is open and takes calls."""
        return self._latest is not None and not self._latest.stream.draining

    @property
    def running(self) -> int:
        """Number of running and waiting calls."""
        latest = 0 if self._latest is None else self._latest.stream.running
        return latest + sum(each.stream.running for each in self._retired)

    async def wait_ready(self) -> None:
        """Returns when a stream is open and takes calls."""
        while not self.ready:
            self._changed.clear()
            await self._changed.wait()

    async def wait_lost(self) -> None:
        """Returns when the open stream has ended or takes no new calls, and at once if there is none."""
        latest = self._latest
        while latest is not None and latest is self._latest and not latest.stream.draining:
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
        """Makes a unary call and returns the encoded response. Waits for an opening stream.

        Args:
            method: Full name of the method, such as kvrouter.v1.IndexerService/FindMatches.
            request: The encoded request.
            time_left: Time for the call, seconds; None for no limit.
            urgent: Whether to send the call ahead of waiting ones.
            trace_context: Trace context (W3C traceparent).

        Raises:
            NotSent: the server never ran the call.
            OutcomeUnknown: the stream ended before the answer.
            CallTimedOut: the call was not answered in time.
            KvRouterError: the server answered with an error.
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

    def ping(self) -> asyncio.Future[bool] | None:
        """Pings the server's event loop; None if it cannot be asked this way. For clients without heartbeats.

        The result is whether it answered before the stream ended. Pings before the answer share it.
        """
        connection = self._latest or (self._retired[-1] if self._retired else None)
        if connection is None or not connection.stream.answers_probes:
            return None
        stream = connection.stream
        if stream.pong is None or stream.pong.done():
            stream.pong = asyncio.get_running_loop().create_future()
            stream.ping()
        return stream.pong

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
        """Starts a call. ``receiver`` is called from the stream's loop; see ``call`` for the rest.

        Raises:
            NotSent: no stream is open, or the server does not accept the call.
        """
        if self._latest is None:
            raise NotSent(f"no call stream to {self._target} is open: {self._failure or 'it is being opened'}")
        stream = self._latest.stream
        call = stream.start(method, request, receiver, time_left=time_left, urgent=urgent, trace_context=trace_context)
        if time_left is not None:
            call.timer = asyncio.get_running_loop().call_later(time_left, stream.time_out, call)
        return call

    async def run(self) -> None:
        """Keeps a stream open until cancelled."""
        async with asyncio.TaskGroup() as streams:
            backoff = Backoff(*_RETRY_SECONDS)
            while True:
                try:
                    await self._keep_stream(streams)
                    backoff.succeeded()
                except _NotOpened:
                    await asyncio.sleep(backoff.failed())

    async def wait_open(self, time_left: float | None = None) -> float | None:
        """Waits for an opening stream. Returns the time left.

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

    async def _keep_stream(self, streams: asyncio.TaskGroup) -> None:
        """Opens a stream and keeps it until it has ended or takes no new calls.

        Raises:
            _NotOpened: it was not opened, lasted only for a moment, or its server broke a rule.
        """
        connection = await self._open()
        loop = asyncio.get_running_loop()
        opened_at = loop.time()
        self._latest, self._failure = connection, ""
        self._changed.set()
        using = streams.create_task(self._use(connection), name="call-stream")
        # Also if it is cancelled before its first step.
        using.add_done_callback(lambda _: connection.close())
        try:
            await connection.replaceable.wait()
        finally:
            self._latest = None
            self._changed.set()
        ended = connection.ended
        if ended is None:
            self._retire(connection)
        if loop.time() - opened_at < _LASTING_SECONDS or (ended is not None and ended.is_violation):
            self._failure = "the server takes no calls on its new connections" if ended is None else str(ended)
            raise _NotOpened
        self._reported.clear()

    async def _open(self) -> ClientConnection:
        """Opens a stream. Tries once more at once if the server has not processed the first attempt.

        Raises:
            _NotOpened: it was not opened.
        """
        for is_last in (False, True):
            try:
                return await ClientConnection.open(
                    self._target,
                    self._client_name,
                    tls=self._tls,
                    role=self._role,
                    metadata=self._metadata,
                    limits=self._limits,
                    counts=self.counts,
                    timeout_seconds=self._heartbeat_timeout,
                    has_heartbeats=self._ends_when_silent,
                )
            except StreamEnded as ended:
                if ended.never_processed and not is_last:
                    continue
                if ended.reason != "lost":
                    self.counts.ended[ended.reason] += 1
                self._report(ended)
                self._failure = str(ended)
                self._changed.set()
        raise _NotOpened

    def _retire(self, connection: ClientConnection) -> None:
        """Lets a stream finish its calls while another one takes the new ones."""
        self._retired.append(connection)
        log.info("call_stream.replaced", server=self._target, calls=connection.stream.running)
        if len(self._retired) > _MAX_RETIRED:
            self._retired[0].end(StreamEnded("draining", "too many streams of this server finish their calls"))

    async def _use(self, connection: ClientConnection) -> None:
        """Uses a stream until it has ended."""
        self.counts.opened += 1
        self.counts.streams += 1
        log.info("call_stream.opened", server=self._target)
        ended = StreamEnded("closed", "the client was closed")
        try:
            ended = await connection.use(self._heartbeat_timeout if self._ends_when_silent else None, self._changed.set)
        finally:
            self.counts.streams -= 1
            self.counts.ended[ended.reason] += 1
            connection.finish(ended)
            self._report(ended)
            if connection in self._retired:
                self._retired.remove(connection)
            self._changed.set()
            log.info("call_stream.ended", server=self._target, reason=ended.reason, cause=str(ended))

    def _report(self, ended: StreamEnded) -> None:
        """Logs a violation or a defect, once for as long as it is repeated."""
        if not ended.is_violation or ended.reason in self._reported:
            return
        self._reported.add(ended.reason)
        log.warning(
            "call_stream.violated",
            server=self._target,
            reason=ended.reason,
            cause=str(ended),
            exc_info=ended.defect,
        )


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

    def on_error(self, error: KvRouterError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
