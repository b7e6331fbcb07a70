"""The I/O of one call stream at its server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import grpc.aio
from kvrouter.net.budgets import loop_budget
from kvrouter.net.calls.errors import ProtocolViolation, parse
from kvrouter.net.calls.limits import CallLimits, CallStreamCounts
from kvrouter.net.calls.server_call import Method, Peer, ServerCall
from kvrouter.net.calls.server_stream import ServerStream
from kvrouter.net.http2 import ReceivedCall
from kvrouter.net.logs import get_logger
from kvrouter.v1.calls_pb2 import OpenCallStreamRequest
from kvrouter.v1.error_encoding import set_error
from kvrouter.v1.errors import BadRequest, KvRouterError

log = get_logger(__name__)

_MESSAGE_US = 50
"""CPU time to take in a message with one call, microseconds."""
_BYTES_PER_US = 50
_TICK_SECONDS = 1.0
_SILENT_TICKS = 10
"""Consecutive ticks without a message after which a client with pings is gone."""
_IDLE_TICKS = 300
"""Consecutive ticks without a call after which the stream of a client without pings ends."""
_LAST_CALL_TICKS = 60
"""Ticks for running calls to end once the client's credential is no longer valid."""
_LAST_WRITE_SECONDS = 1.0
"""Time for a write to finish before the stream ends with a status, seconds. gRPC cannot send one during the first
write; a later write that takes so long is cancelled."""


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
        self._wakeup = asyncio.Event()
        self._ended: asyncio.Future[ProtocolViolation | str] = asyncio.get_running_loop().create_future()
        """Why the stream ends."""
        self._half_closed = False
        self._drained_reason = "draining"
        self._stopping = False
        self.stream = ServerStream(
            parse(OpenCallStreamRequest, first, limits), methods, limits, counts, self._wakeup.set, run
        )
        self.stream.metadata = tuple(context.invocation_metadata() or ())
        self.stream.on_overflow = self._overflow
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
        writing = asyncio.create_task(self._write(), name="call-stream-write")
        tasks = [
            writing,
            asyncio.create_task(self._read(), name="call-stream-read"),
            asyncio.create_task(self._watch(), name="call-stream-watch"),
        ]
        reason = "lost"
        try:
            ended = await self._ended
            self.stream.lose()
            self._stopping = True
            self._wakeup.set()
            await asyncio.wait([writing], timeout=_LAST_WRITE_SECONDS)
            if isinstance(ended, ProtocolViolation):
                reason = ended.reason
                refuse(self._context, ended)
            else:
                reason = ended
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self.stream.lose()
            counts.streams -= 1
            counts.ended[reason] += 1
            log.info("call_stream.ended", client=self.stream.client_name, reason=reason)

    def end(self, why: ProtocolViolation | str) -> None:
        """Ends the stream; ``why`` is the reason for metrics, or a violation, which the client is told."""
        if not self._ended.done():
            self._ended.set_result(why)

    def _overflow(self) -> None:
        self.end(
            ProtocolViolation("unread", "the client reads its responses too slowly", grpc.StatusCode.RESOURCE_EXHAUSTED)
        )

    async def _read(self) -> None:
        context, stream = self._context, self.stream
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                await loop_budget().turn(_MESSAGE_US + len(message) // _BYTES_PER_US)
                stream.receive(message)
        except ProtocolViolation as violation:
            self.end(violation)
            return
        # The client sends nothing more, but reads the answers to what it has sent.
        self._half_closed = True
        stream.drain()
        self._wakeup.set()

    async def _write(self) -> None:
        context, stream, wakeup = self._context, self.stream, self._wakeup
        while not self._stopping:
            await wakeup.wait()
            wakeup.clear()
            while not self._stopping and (message := stream.next_message()) is not None:
                await context.write(message)
            if stream.drained:
                self.end("closed" if self._half_closed else self._drained_reason)

    async def _watch(self) -> None:
        """Ends the stream of a silent, idle or no longer admitted client.

        Ticks of this loop are counted, not seconds, so a frozen server does not take its clients
        for gone.
        """
        stream = self.stream
        silent = ticks_left = 0
        while silent < _SILENT_TICKS:
            await asyncio.sleep(_TICK_SECONDS)
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
    log.warning("call_stream.refused", peer=context.peer(), reason=violation.reason, cause=str(violation))
    advice = "Follow the rules of kvrouter/v1/calls.proto."
    set_error(context, BadRequest(str(violation), code=violation.code, advice=advice))
