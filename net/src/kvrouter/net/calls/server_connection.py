"""The I/O of one call stream at its server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import grpc
from kvrouter.net.calls.errors import ProtocolViolation, parse
from kvrouter.net.calls.limits import CallLimits, CallStreamCounts
from kvrouter.net.calls.server_call import Method, Peer, ServerCall
from kvrouter.net.calls.server_stream import ServerStream
from kvrouter.net.http2 import ReceivedCall
from kvrouter.net.logs import get_logger
from kvrouter.net.ticks import tick
from kvrouter.v1.calls_pb2 import OpenCallStreamRequest
from kvrouter.v1.error_encoding import set_error
from kvrouter.v1.errors import BadRequest, KvRouterError

log = get_logger(__name__)

_TICK_SECONDS = 1.0
_SILENT_TICKS = 10
"""Consecutive ticks without a message after which a client with pings is gone."""
_IDLE_TICKS = 300
"""Consecutive ticks without a call after which the stream of a client without pings ends."""
_LAST_CALL_TICKS = 60
"""Ticks for running calls to end once the client's credential is no longer valid."""


class StreamConnection:
    """The I/O of one stream."""

    def __init__(
        self,
        first: bytes,
        methods: Sequence[Method],
        limits: CallLimits,
        counts: CallStreamCounts,
        context: ReceivedCall,
        peer: Peer | None,
        run: Callable[[ServerCall, Awaitable[bytes]], None],
    ) -> None:
        """Opens the stream.

        Args:
            first: The client's first message.
            methods: The methods of the server.
            limits: Bounds of memory and messages.
            counts: Counts of this and other streams.
            context: The stream's RPC.
            peer: Decides about the client's calls; None permits all.
            run: Runs the awaitable of a call.

        Raises:
            ProtocolViolation: the first message opens no stream.
        """
        self._context = context
        self._counts = counts
        self._ended: asyncio.Future[ProtocolViolation | str] = asyncio.get_running_loop().create_future()
        """Why the stream ends."""
        self._drained_reason = "draining"
        self.stream = ServerStream(
            parse(OpenCallStreamRequest, first, limits), methods, limits, counts, context.wake, run
        )
        self.stream.metadata = context.invocation_metadata()
        self.stream.on_overflow = self._overflow
        self.stream.on_drained = lambda: self.end(self._drained_reason)
        self._peer = peer
        self._methods = [method.name for method in methods]
        if peer is not None:
            self.stream.check = peer.check

    async def serve(self) -> None:
        """Serves the stream until it ends."""
        counts = self._counts
        counts.opened += 1
        counts.streams += 1
        log.info("call_stream.opened", client=self.stream.client_name)
        watching = asyncio.create_task(self._watch(), name="call-stream-watch")
        reason = "lost"
        try:
            self._context.start(self._receive, self._half_closed, self.stream.next_message)
            ended = await self._ended
            self.stream.lose()
            if isinstance(ended, ProtocolViolation):
                reason = ended.reason
                refuse(self._context, ended)
            else:
                reason = ended
        finally:
            watching.cancel()
            await asyncio.wait([watching])
            self.stream.lose()
            counts.streams -= 1
            counts.ended[reason] += 1
            log.info("call_stream.ended", client=self.stream.client_name, reason=reason)

    def end(self, why: ProtocolViolation | str) -> None:
        """Ends the stream; ``why`` is the reason for metrics, or a violation, which the client is told."""
        if not self._ended.done():
            self._ended.set_result(why)
            self._context.stop()

    def _overflow(self) -> None:
        self.end(
            ProtocolViolation("unread", "the client reads its responses too slowly", grpc.StatusCode.RESOURCE_EXHAUSTED)
        )

    def _receive(self, message: bytes) -> None:
        try:
            self.stream.receive(message)
        except ProtocolViolation as violation:
            self.end(violation)

    def _half_closed(self) -> None:
        # The client reads the answers to what it has sent.
        self._end_when_drained("closed")

    async def _watch(self) -> None:
        """Ends the stream of a silent, idle or no longer admitted client.

        Ticks of this loop are counted, not seconds, so a frozen server does not take its clients
        for gone.
        """
        stream = self.stream
        silent = ticks_left = 0
        while silent < _SILENT_TICKS:
            await tick(_TICK_SECONDS)
            silent = silent + 1 if stream.sends_pings and not stream.heard else 0
            stream.heard = False
            stream.tick()
            if stream.idle_ticks >= _IDLE_TICKS and not stream.sends_pings:
                self._end_when_drained("idle")
            elif ticks_left:
                ticks_left -= 1
                if not ticks_left:
                    self.end("credential")
            elif not self._admitted():
                self._end_when_drained("credential")
                ticks_left = _LAST_CALL_TICKS
        self.end(ProtocolViolation("silent", f"no message for {_SILENT_TICKS} s", grpc.StatusCode.DEADLINE_EXCEEDED))

    def _end_when_drained(self, reason: str) -> None:
        if self._drained_reason != "closed":
            self._drained_reason = reason
        self.stream.drain()

    def _admitted(self) -> bool:
        """Returns whether the client's credential still opens a stream."""
        if self._peer is None:
            return True
        try:
            self._peer.open_stream(self._methods)
        except KvRouterError:
            return False
        return True

    @property
    def idle_ticks(self) -> int:
        """Number of seconds for which no call has run."""
        return 0 if self.stream.running else self.stream.idle_ticks


def refuse(context: ReceivedCall, violation: ProtocolViolation) -> None:
    """Ends a stream because of a violation."""
    log.warning("call_stream.refused", peer=context.connection.peer, reason=violation.reason, cause=str(violation))
    advice = "Follow the rules of kvrouter/v1/calls.proto."
    set_error(context, BadRequest(str(violation), code=violation.code, advice=advice))
