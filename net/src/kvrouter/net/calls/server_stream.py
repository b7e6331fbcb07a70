"""The server's side of one call stream: running calls, and messages to send. Does no I/O.

Every call is answered once: with responses and an end, or with a failure. A call the client cancels is answered as
cancelled at once, however long its handler takes to notice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc
from kvrouter.core import Call, call_of, read_calls, write_responses
from kvrouter.net.calls.errors import ProtocolViolation, parse
from kvrouter.net.calls.limits import ITEM_BYTES, SPARSE_PINGS, VERSION, CallLimits, CallStreamCounts
from kvrouter.net.calls.server_call import FAILED, PART, Method, ServerCall
from kvrouter.net.logs import get_logger
from kvrouter.v1.calls_pb2 import (
    CallFailure,
    CallStreamDraining,
    CallStreamServerHello,
    OpenCallStreamRequest,
    OpenCallStreamResponse,
)
from kvrouter.v1.error_encoding import from_parts
from kvrouter.v1.errors import Internal, KvRouterError, TooLarge, TooMuchUnread, Unimplemented

log = get_logger(__name__)


_QUIET_TICKS = 30
"""Consecutive ticks without a further part after which a request is given up."""
_LEAST_MESSAGE_BYTES = 64 << 10
"""Least size a client must accept, so a failure with all its details fits."""


@dataclass(slots=True)
class _Unfinished:
    """A request of which more parts are to come."""

    call: ServerCall
    method: int
    """Index of the method."""
    received: bytearray
    quiet_ticks: int = 0
    """Ticks without a further part."""


class ServerStream:
    """One open call stream.

    ``wake`` is called when there is something to send; ``run`` runs the awaitable of a call and answers it.
    """

    def __init__(
        self,
        hello: OpenCallStreamRequest,
        methods: Sequence[Method],
        limits: CallLimits,
        counts: CallStreamCounts,
        wake: Callable[[], None],
        run: Callable[[ServerCall, Awaitable[bytes]], None],
    ) -> None:
        """``hello`` is the client's first message.

        Raises:
            ProtocolViolation: it opens no stream, or one of another version.
        """
        if "client_hello" not in hello or hello.calls or hello.cancelled or "ping" in hello:
            raise ProtocolViolation("hello", "expected a first message with a hello and nothing else")
        opening = hello.client_hello
        if opening.version != VERSION:
            raise ProtocolViolation(
                "version",
                f"expected version {VERSION} of the protocol, received {opening.version}",
                grpc.StatusCode.UNIMPLEMENTED,
            )
        message_bytes = opening.max_message_bytes if "max_message_bytes" in opening else limits.message_bytes
        if message_bytes < _LEAST_MESSAGE_BYTES:
            raise ProtocolViolation(
                "hello", f"expected max_message_bytes of at least {_LEAST_MESSAGE_BYTES}, received {message_bytes}"
            )
        self.client_name = opening.client_name[:256]
        self.metadata: Sequence[tuple[str, str | bytes]] = ()
        self.check: Callable[[str], None] | None = None
        """Raises ``KvRouterError`` if the client may not call a method; None permits all."""
        self.counts = counts
        self.unread_call_bytes = limits.unread_call_bytes
        self.heard = False
        """Whether a message arrived since this was last set to False."""
        self.sends_pings = False
        """Whether the client has sent a ping that obliges it to send more."""
        self.idle_ticks = 0
        """Consecutive ticks at which no call ran and no ping came."""
        self._has_sparse_pings = SPARSE_PINGS in opening.capabilities
        self._methods = methods
        self._limits = limits
        self._message_bytes = min(limits.message_bytes, message_bytes)
        self._part_bytes = min(limits.part_bytes, self._message_bytes // 4)
        self._wake = wake
        self._run = run
        self._calls: dict[int, ServerCall] = {}
        self._unfinished: dict[int, _Unfinished] = {}
        self._unfinished_bytes = 0
        self._last_number = 0
        self._queue: deque[tuple[ServerCall, int, bytes]] = deque()
        self._offset = 0
        """Bytes of the first queued response sent in parts."""
        self._unread_bytes = 0
        self._hello: CallStreamServerHello | None = CallStreamServerHello(
            version=VERSION,
            methods=[method.name for method in methods],
            capabilities=[SPARSE_PINGS],
            max_message_bytes=limits.message_bytes,
            max_calls=limits.calls,
            max_request_bytes=limits.request_bytes,
        )
        self._pong: int | None = None
        self._draining = False
        self._announced = False
        self.on_drained: Callable[[], None] = lambda: None
        """Called once everything is sent after ``drain`` was announced."""
        self.on_overflow: Callable[[], None] = lambda: None
        """Called when so much is unread that the stream must end."""
        self._on_lost: list[Callable[[], None]] = []
        wake()

    @property
    def running(self) -> int:
        """Number of calls without an answer."""
        return len(self._calls)

    @property
    def drained(self) -> bool:
        """Whether ``drain`` was announced, and every call is answered."""
        return self._announced and not self._calls and not self._queue

    def drain(self) -> None:
        """Announces the end of new calls. Running ones go on."""
        if not self._draining:
            self._draining = True
            self._wake()

    def receive(self, encoded: bytes) -> None:
        """Processes a message of the client.

        Raises:
            ProtocolViolation: the message breaks a rule of the protocol.
        """
        self.heard = True
        calls = read_calls(encoded) if len(encoded) <= self._limits.message_bytes else None
        if calls is None:
            calls = self._receive_any(encoded)
        for call in calls:
            self._receive_call(*call)
        self.counts.messages_received += 1
        self.counts.items_received += len(calls)

    def _receive_any(self, encoded: bytes) -> list[Call]:
        """Processes a message that may have more than calls. Returns the calls."""
        message = parse(OpenCallStreamRequest, encoded, self._limits)
        if "client_hello" in message:
            raise ProtocolViolation("hello", "expected one hello on a stream, received another")
        for number in message.cancelled:
            self._cancel(number)
        if "ping" in message:
            self._pong = message.ping
            self.sends_pings = not self._has_sparse_pings
            self.idle_ticks = 0
            self._wake()
        return [call_of(call) for call in message.calls]

    def next_message(self) -> bytes | None:
        """Returns the next message to write: all waiting items with room. None if nothing does."""
        announces = self._draining and not self._announced
        if not (self._queue or self._pong is not None or announces or self._hello):
            if self._announced and self.drained:
                self.on_drained()
            return None
        self.counts.messages_sent += 1
        if self._hello is not None:
            hello, self._hello = self._hello, None
            return OpenCallStreamResponse(server_hello=hello).SerializeToString()
        head = b""
        if self._pong is not None or announces:
            draining = CallStreamDraining(last_call=self._last_number) if announces else None
            head = OpenCallStreamResponse(pong=self._pong, draining=draining).SerializeToString()
            self._pong = None
            self._announced |= announces
        return head + self._encoded_responses()

    def lose(self) -> None:
        """Ends every call because the stream has ended."""
        self._draining = self._announced = True
        self._queue.clear()
        self.counts.unread_bytes -= self._unread_bytes
        self._unread_bytes = 0
        for number in list(self._unfinished):
            self._drop_unfinished(number)
        calls, self._calls = self._calls, {}
        self.counts.running -= len(calls)
        for call in calls.values():
            call.abandon()
        callbacks, self._on_lost = self._on_lost, []
        for callback in callbacks:
            try:
                callback()
            except Exception:
                log.exception("call_stream.callback_failed", client=self.client_name)

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Calls the callback once the stream has ended."""
        self._on_lost.append(callback)

    def queue(self, call: ServerCall, kind: int, response: bytes | CallFailure) -> None:
        """Queues a response of a call."""
        if kind:
            del self._calls[call.number]
            self.counts.running -= 1
        if isinstance(response, CallFailure):
            self.counts.failed[from_parts(response.code, response.message).code.name] += 1
            response = response.SerializeToString()
        size = ITEM_BYTES + len(response)
        call.unread_bytes += size
        limits, counts = self._limits, self.counts
        if self._unread_bytes >= limits.unread_stream_bytes or counts.unread_bytes >= limits.server_unread_bytes:
            self.on_overflow()
        self._unread_bytes += size
        counts.unread_bytes += size
        queue = self._queue
        queue.append((call, kind, response))
        if len(queue) == 1:
            self._wake()

    def end_unread(self, call: ServerCall) -> None:
        """Ends a call of which too much is unread."""
        call.fail(TooMuchUnread(f"{call.unread_bytes} bytes of output wait to be read"))
        call.cancelled()

    def _encoded_responses(self) -> bytes:
        """Returns responses up to the limit, in order, encoded."""
        room = self._message_bytes - 2 * ITEM_BYTES
        queue = self._queue
        whole: list[tuple[int, bytes]] = []
        others: list[tuple[int, int, bytes]] = []
        in_parts: set[int] = set()
        part = self._part_bytes + ITEM_BYTES
        while queue:
            call, kind, response = queue[0]
            number, size = call.number, ITEM_BYTES + len(response)
            taken = size if kind == FAILED else min(size, part)
            if taken > room:
                break
            if taken < size:
                start = self._offset
                self._offset = end = start + self._part_bytes
                in_parts.add(number)
                if end < len(response):
                    others.append((number, PART, response[start:end]))
                    room -= taken
                    continue
                self._offset = 0
                others.append((number, kind, response[start:]))
            elif kind:
                others.append((number, kind, response))
            elif number in in_parts:
                break  # In this message it would precede the parts of an earlier response.
            else:
                whole.append((number, response))
            room -= taken
            queue.popleft()
            call.unread_bytes -= size
            self._unread_bytes -= size
            self.counts.unread_bytes -= size
        self.counts.items_sent += len(whole) + len(others)
        return write_responses(whole, others)

    def _cancel(self, number: int) -> None:
        if self._announced and number > self._last_number:
            return
        if not 0 < number <= self._last_number:
            raise ProtocolViolation("unknown_call", f"received a cancel of call {number}, which was not sent")
        self._drop_unfinished(number)
        call = self._calls.get(number)
        if call is not None:
            call.fail(KvRouterError("the call was cancelled", code=grpc.StatusCode.CANCELLED))
            call.cancelled()

    def _receive_call(
        self, number: int, method: int, request: bytes, more: bool, time_left_ms: int | None, trace_context: str
    ) -> None:
        if number == self._last_number + 1:
            if self._announced:
                return  # The client knows that calls after the last one are not run.
            self._last_number = number
            time_left = None if time_left_ms is None else time_left_ms / 1e3
            call = ServerCall(self, number, time_left, trace_context)
            self._calls[number] = call
            counts = self.counts
            counts.calls += 1
            counts.running += 1
            if len(self._calls) > self._limits.calls:
                call.fail(TooLarge(f"the stream runs its {self._limits.calls} calls already"))
            elif counts.running > self._limits.server_calls:
                call.fail(TooLarge(f"the server runs its {self._limits.server_calls} calls already"))
            elif self.check is not None:
                self._admit(call, method, self.check)
            if more:
                if len(self._unfinished) >= self._limits.calls:
                    raise ProtocolViolation("unfinished", f"received parts of more than {self._limits.calls} calls")
                self._unfinished[number] = unfinished = _Unfinished(call, method, bytearray())
                self._add_part(unfinished, request, more=more)
            else:
                self._start(call, method, request)
        elif number in self._unfinished:
            self._add_part(self._unfinished[number], request, more=more)
        elif not self._announced or number <= self._last_number:
            raise ProtocolViolation(
                "unknown_call", f"expected call {self._last_number + 1} or a further part, received call {number}"
            )

    def _drop_unfinished(self, number: int) -> None:
        unfinished = self._unfinished.pop(number, None)
        if unfinished is not None:
            self._forget(unfinished)

    def _forget(self, unfinished: _Unfinished) -> None:
        size = len(unfinished.received)
        self._unfinished_bytes -= size
        self.counts.unfinished_bytes -= size
        unfinished.received = bytearray()

    def _add_part(self, unfinished: _Unfinished, part: bytes, *, more: bool) -> None:
        call = unfinished.call
        unfinished.quiet_ticks = 0
        if not call.ended:
            unfinished.received += part
            size = len(part)
            self._unfinished_bytes += size
            self.counts.unfinished_bytes += size
            limits = self._limits
            if max(len(unfinished.received), self._unfinished_bytes // 2) > limits.request_bytes:
                call.fail(
                    TooLarge(f"expected a request of at most {limits.request_bytes} bytes, received a longer one")
                )
            elif self.counts.unfinished_bytes > limits.server_unfinished_bytes:
                call.fail(TooLarge("the server receives as much of unfinished requests as it has room for"))
        if call.ended:
            self._forget(unfinished)
        if not more:
            del self._unfinished[call.number]
            request = bytes(unfinished.received)
            self._forget(unfinished)
            self._start(call, unfinished.method, request)

    def tick(self) -> None:
        """Gives up requests whose parts stopped coming, and counts for how long no call has run. Called each second."""
        self.idle_ticks = 0 if self._calls else self.idle_ticks + 1
        for unfinished in list(self._unfinished.values()):
            unfinished.quiet_ticks += 1
            if unfinished.quiet_ticks >= _QUIET_TICKS and not unfinished.call.ended:
                unfinished.call.fail(
                    KvRouterError(
                        "the rest of the request did not arrive in time", code=grpc.StatusCode.DEADLINE_EXCEEDED
                    )
                )
                self._forget(unfinished)

    def _admit(self, call: ServerCall, index: int, check: Callable[[str], None]) -> None:
        """Fails a call of a method the client may not call."""
        if index < len(self._methods):
            try:
                check(self._methods[index].name)
            except KvRouterError as refused:
                call.fail(refused)

    def _start(self, call: ServerCall, index: int, request: bytes) -> None:
        if call.ended:
            return
        if index >= len(self._methods):
            call.fail(Unimplemented(f"the call stream has no method {index}"))
            return
        method = self._methods[index]
        try:
            if method.unary is None:
                assert method.streaming is not None  # noqa: S101 - a method has one handler
                method.streaming(request, call)
                return
            answer = method.unary(request, call)
            if isinstance(answer, bytes):
                call.end(answer)
            else:
                self._run(call, answer)
        except KvRouterError as refused:
            call.fail(refused)
        except Exception:
            log.exception("call.failed", method=method.name)
            call.fail(Internal("the call failed; the server's log has the cause"))
