"""The client's side of one open call stream with its connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvrouter.net.calls.client_stream import ClientStream
from kvrouter.net.calls.errors import ProtocolViolation, parse
from kvrouter.net.calls.limits import MISSES, SPARSE_PINGS, VERSION, CallLimits, CallStreamCounts, HeartbeatMonitor
from kvrouter.net.calls.server import SERVICE
from kvrouter.net.http2 import ConnectionLost, GrpcConnection, Http2Violation, Metadata
from kvrouter.net.tls.tls import Tls
from kvrouter.v1.calls_pb2 import CallStreamClientHello, OpenCallStreamRequest, OpenCallStreamResponse

_PATH = f"/{SERVICE}/OpenCallStream"
_INTENDED = frozenset({"closed", "lost", "silent", "draining"})
"""Reasons within the rules."""


class StreamEnded(Exception):
    """The stream has ended, or could not be opened."""

    def __init__(self, reason: str, cause: str) -> None:
        """``reason`` is a short label for metrics."""
        super().__init__(cause)
        self.reason = reason
        self.never_processed = False
        """Whether the server has said it processed nothing."""
        self.defect: Exception | None = None
        """The unexpected exception behind the end of the stream."""

    @property
    def is_violation(self) -> bool:
        """Whether the server broke a rule, or sent a message this client could not process."""
        return self.reason not in _INTENDED

    @classmethod
    def by(cls, error: Exception) -> StreamEnded:
        """Returns the end of a stream by an error. Whatever the error is, only the stream has ended."""
        if isinstance(error, StreamEnded):
            return error
        if isinstance(error, ConnectionLost):
            lost = cls("lost", str(error))
            lost.never_processed = error.never_processed
            return lost
        if isinstance(error, Http2Violation | ProtocolViolation):
            return cls(error.reason, str(error))
        failed = cls("failed", f"{type(error).__name__}: {error}"[:_MAX_CAUSE])
        failed.defect = error
        return failed


_MAX_CAUSE = 512


class ClientConnection:
    """One open stream."""

    def __init__(self, connection: GrpcConnection, stream: ClientStream) -> None:
        self._connection = connection
        self.stream = stream
        """Its calls."""
        self.ended: StreamEnded | None = None
        """How it has ended; None while it is open."""
        self.replaceable = asyncio.Event()
        """Set when another stream may take the new calls: this one has ended, or its server said GOAWAY."""
        self._changed: Callable[[], object] = self.replaceable.is_set

    @classmethod
    async def open(
        cls,
        target: str,
        client_name: str,
        *,
        tls: Tls | None,
        role: str,
        metadata: Callable[[], Metadata],
        limits: CallLimits,
        counts: CallStreamCounts,
        timeout_seconds: float,
        has_heartbeats: bool,
    ) -> ClientConnection:
        """Opens a stream; see ``CallStreamClient``. Without heartbeats its pings are sparse.

        Raises:
            StreamEnded: it was not opened.
        """
        connection: GrpcConnection | None = None
        opened: ClientConnection | None = None
        hello = CallStreamClientHello(
            version=VERSION,
            client_name=client_name,
            capabilities=() if has_heartbeats else (SPARSE_PINGS,),
            max_message_bytes=limits.message_bytes,
        )
        try:
            async with asyncio.timeout(timeout_seconds):
                connection = await GrpcConnection.open(
                    target,
                    _PATH,
                    tls=tls,
                    role=role,
                    metadata=metadata(),
                    max_message_bytes=limits.message_bytes,
                    within_seconds=timeout_seconds,
                )
                first = await connection.exchange(OpenCallStreamRequest(client_hello=hello).SerializeToString())
            message = parse(OpenCallStreamResponse, first, limits)
            opened = cls(connection, ClientStream(message.server_hello, limits, counts, connection.wake))
        except TimeoutError:
            raise StreamEnded("silent", f"no answer for {timeout_seconds:g} s") from None
        except Exception as error:
            raise StreamEnded.by(error) from None
        else:
            return opened
        finally:
            if opened is None and connection is not None:
                connection.close()

    async def use(self, timeout_seconds: float | None, changed: Callable[[], object]) -> StreamEnded:
        """Exchanges messages until the stream has ended. Returns how.

        Args:
            timeout_seconds: Silence after which the stream is given up, seconds; None for any silence.
            changed: Called when the stream takes no new calls any more.
        """
        self._changed = changed
        self._connection.on_going_away = self._retire
        self.stream.on_draining = self._drain
        self._connection.start(self.stream.receive, self.stream.next_message)
        if self._connection.going_away:
            self._retire()
        watching = asyncio.create_task(self._end_when_silent(timeout_seconds), name="call-stream-heartbeats")
        try:
            await self._connection.wait_ended()
        except Exception as error:
            if self.stream.draining and isinstance(error, ConnectionLost):
                return StreamEnded("draining", "the server has stopped")
            return StreamEnded.by(error)
        finally:
            watching.cancel()
            await asyncio.wait({watching})
        return StreamEnded("lost", "the call has ended")

    def finish(self, ended: StreamEnded) -> None:
        """Ends the remaining calls."""
        self.ended = ended
        self.stream.lose(str(ended), has_unwritten=self._connection.has_unwritten)
        self.replaceable.set()

    def end(self, ended: StreamEnded) -> None:
        """Ends the stream."""
        self._connection.end(ended)

    def close(self) -> None:
        """Closes the connection."""
        if self.ended is None:
            self.finish(StreamEnded("closed", "the client was closed"))
        self._connection.close()

    def _drain(self) -> None:
        self._changed()
        self._end_when_idle()

    def _retire(self) -> None:
        self.stream.retire()
        self.replaceable.set()
        self._drain()

    def _end_when_idle(self) -> None:
        """Ends a stream another one replaces when its last call has ended."""
        if self.replaceable.is_set() and not self.stream.running:
            self.end(StreamEnded("draining", "the server takes no further calls on this connection"))

    async def _end_when_silent(self, timeout_seconds: float | None) -> None:
        if timeout_seconds is None:
            return
        monitor = HeartbeatMonitor()
        while not monitor.silent:
            await asyncio.sleep(timeout_seconds / MISSES)
            if self.stream.heard:
                monitor.heard()
            self.stream.heard = False
            monitor.tick()
            self.stream.ping()
        self.end(StreamEnded("silent", f"no answer for {timeout_seconds:g} s"))
