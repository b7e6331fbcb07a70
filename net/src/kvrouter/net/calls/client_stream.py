"""The client's side of one call stream: messages to send, and the running calls. Does no I/O.

Each call ends once: answered, failed, or cancelled by its caller. A call gets its number when its first part is put
into a message, and counts as sent once its last part is. So a call not sent when the stream ends was never run,
and neither was one whose last part is in a message not written in whole.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from kvrouter.core import Call, TokenWriter, read_responses, write_calls
from kvrouter.net.budgets import FloodBudget
from kvrouter.net.calls.errors import (
    CallTimedOut,
    NotSent,
    OutcomeUnknown,
    ProtocolViolation,
    parse,
)
from kvrouter.net.calls.limits import ITEM_BYTES, SPARSE_PINGS, VERSION, CallLimits, CallStreamCounts
from kvrouter.net.calls.running_call import Lane, ResponseReceiver, RunningCall
from kvrouter.net.calls.unfinished_responses import UnfinishedResponses
from kvrouter.net.logs import get_logger
from kvrouter.net.wire_format import encode_varint, tag
from kvrouter.v1.calls_pb2 import (
    CallFailure,
    CallRequest,
    CallResponseKind,
    CallStreamServerHello,
    OpenCallStreamRequest,
    OpenCallStreamResponse,
)
from kvrouter.v1.error_encoding import from_parts
from kvrouter.v1.errors import KvRouterError, TooMuchUnread

log = get_logger(__name__)

_LAST = CallResponseKind.CALL_RESPONSE_KIND_LAST
_PART = CallResponseKind.CALL_RESPONSE_KIND_PART
_ENDED = CallResponseKind.CALL_RESPONSE_KIND_ENDED
_FAILED = CallResponseKind.CALL_RESPONSE_KIND_FAILED
_WHOLE_KINDS = frozenset({_LAST, 0, _FAILED, _ENDED})
"""Kinds of responses other than parts."""

_CANCEL_BYTES = 10
"""Upper bound of the bytes a cancelled number takes in a message."""
_CALLS_TAG, _REQUEST_TAG = tag(OpenCallStreamRequest, "calls"), tag(CallRequest, "request")
_CALL_BYTES = 2 * ITEM_BYTES
"""Upper bound of the bytes a call takes in a message beside its request."""
_LEAST_MESSAGE_BYTES = 4096
_FLOOD_ITEMS = 10_000
_FLOOD_SECONDS = 10.0
"""Items and messages without a running call a server may send in this time. They take some 20 ms to read."""
_ITEMS_OF_EMPTY_MESSAGE = 10
"""A message without an item takes as long to parse as this number of items."""
_ITEMS_OF_CANCEL = 100
"""Responses of a cancelled call under way."""


# The messages of a probe. There are hundreds a second, for thousands of idle servers.
_PING = OpenCallStreamRequest(ping=1).SerializeToString()
_PONG = OpenCallStreamResponse(pong=1).SerializeToString()

_LEAST_PART_BYTES = 256
"""Parts below this size are items of a flood: a server cuts long responses only."""


class ClientStream:
    """One open call stream. ``wake`` is called when there is something to send."""

    def __init__(
        self, hello: CallStreamServerHello, limits: CallLimits, counts: CallStreamCounts, wake: Callable[[], None]
    ) -> None:
        """``hello`` is the server's.

        Raises:
            ProtocolViolation: the server speaks another version of the protocol.
        """
        if hello.version != VERSION:
            raise ProtocolViolation("version", f"expected version {VERSION} of the protocol, received {hello.version}")
        self.counts = counts
        self.draining = False
        """Whether the stream takes no new calls."""
        self.heard = False
        """Whether a message arrived since this was last set to False."""
        self.answers_probes = SPARSE_PINGS in hello.capabilities
        """Whether the server answers pings at any pace."""
        self._drained = False
        """Whether the server has said which is the last call it runs."""
        self._limits = limits
        self._wake = wake
        self.on_draining: Callable[[], None] = lambda: None
        """Called after a read's messages, and when nothing waits to be sent, while the stream takes no new calls."""
        self._methods = {name: index for index, name in enumerate(hello.methods)}
        self._message_bytes = min(limits.message_bytes, hello.max_message_bytes)
        self._max_calls, self._max_request_bytes = hello.max_calls, hello.max_request_bytes
        if self._message_bytes < _LEAST_MESSAGE_BYTES or not self._max_calls or not self._max_request_bytes:
            raise ProtocolViolation(
                "hello",
                f"expected max_message_bytes >= {_LEAST_MESSAGE_BYTES}, max_calls and max_request_bytes >= 1, "
                f"received {hello.max_message_bytes}, {self._max_calls} and {self._max_request_bytes}",
            )
        self._part_bytes = min(limits.part_bytes, self._message_bytes // 4)
        self._last_number = 0
        self._calls: dict[int, RunningCall] = {}
        self._writers: dict[int, TokenWriter] = {}
        """Writers that are offered the responses of running calls, by number."""
        self._unfinished = UnfinishedResponses()
        self._flood = FloodBudget(_FLOOD_ITEMS, _FLOOD_SECONDS)
        self._in_latest_message: list[RunningCall] = []
        """Calls whose last part is in the latest message."""
        self._urgent: Lane = OrderedDict()
        self._short: Lane = OrderedDict()
        self._long: Lane = OrderedDict()
        self._cancelled: deque[int] = deque()
        self._queued_bytes = 0
        self._ping = 0
        self.pong: asyncio.Future[bool] | None = None
        """Receives whether a probing ping is answered; None while none is under way."""

    @property
    def running(self) -> int:
        """Number of calls the server has to answer, and of waiting ones."""
        return len(self._calls) + len(self._urgent) + len(self._short) + len(self._long)

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
        """Starts a call.

        Args:
            method: Full name of the method, such as kvrouter.v1.IndexerService/FindMatches.
            request: The encoded request.
            receiver: Receives the responses.
            time_left: Time for the call, seconds; None for no limit. The caller ends the call when it is up.
            urgent: Whether to send the call ahead of waiting ones. Its request must be short.
            trace_context: Trace context (W3C traceparent), at most 64 characters.

        Raises:
            NotSent: the server is stopping, lacks the method or accepts no such request, or too much is waiting.
            ValueError: the trace context is too long.
        """
        index = self._methods.get(method)
        size = len(request)
        if self.draining or index is None or size > self._max_request_bytes:
            raise NotSent(self._why_not(method, size))
        if len(trace_context) > ITEM_BYTES:
            raise ValueError(f"expected a trace context of at most {ITEM_BYTES} characters, got {len(trace_context)}")
        if self.running >= self._max_calls or self._queued_bytes >= self._limits.queued_bytes:
            raise NotSent(f"{self.running} calls are running or waiting: the server answers too slowly")
        call = RunningCall(self, index, request, receiver, time_left, trace_context)
        call.lane = self._long if size > self._part_bytes else self._urgent if urgent else self._short
        call.lane[call] = None
        self._queued_bytes += size
        counts = self.counts
        counts.calls += 1
        counts.running += 1
        self._wake()
        return call

    def cancel(self, call: RunningCall) -> None:
        """Ends a call for its caller. The server is informed if any part of the call was sent."""
        call.release()
        self.counts.running -= 1
        self._leave_lane(call)
        if call.number:
            self._forget_output(call)
            self._cancelled.append(call.number)
            self._flood.earn(_ITEMS_OF_CANCEL)
        self._wake()

    def time_out(self, call: RunningCall) -> None:
        """Ends a call because its time is up."""
        receiver = call.receiver
        if receiver is not None:
            self.counts.failed["timed_out"] += 1
            self.cancel(call)
            receiver.on_error(CallTimedOut())

    def ping(self) -> None:
        """Requests an answer of the server's event loop."""
        self._ping += 1
        self._wake()

    def next_message(self) -> bytes | None:
        """Returns the next message to write: all waiting items with room. None if nothing does."""
        self._in_latest_message = []
        if not (self._ping or self._cancelled or self._urgent or self._short or self._long):
            if self.draining:
                self.on_draining()
            return None
        room = self._message_bytes - ITEM_BYTES
        head = b""
        if self._cancelled or self._ping:
            count = min(len(self._cancelled), room // 4 // _CANCEL_BYTES)
            cancelled = [self._cancelled.popleft() for _ in range(count)]
            if cancelled or self._ping > 1:
                head = OpenCallStreamRequest(cancelled=cancelled, ping=self._ping or None).SerializeToString()
            else:
                head = _PING
            room -= _CANCEL_BYTES * count
            self._ping = 0
        # A long request gets part of the message, however many short ones wait.
        part = self._part_bytes + _CALL_BYTES
        kept = part if self._long else 0
        calls: list[Call] = []
        for lane in (self._urgent, self._short):
            while lane:
                call = next(iter(lane))
                size = len(call.request) + _CALL_BYTES
                if size > room - kept:
                    break
                room -= size
                self._number(call)
                calls.append((call.number, call.method, call.request, False, call.time_left_ms(), call.trace))
                self._in_latest_message.append(call)
                self._leave_lane(call)
        parts: list[bytes | memoryview] = []
        while self._long and room >= part:
            parts += self._encoded_part(next(iter(self._long)))
            room -= part
        if not (calls or parts or head):
            return None
        self.counts.messages_sent += 1
        self.counts.items_sent += len(calls) + len(parts) // 2
        return b"".join((head, write_calls(calls), *parts))

    def receive(self, messages: Sequence[bytes]) -> None:
        """Processes messages of the server, in order.

        Raises:
            ProtocolViolation: one breaks a rule of the protocol.
        """
        self.heard = True
        counts, start = self.counts, 0
        while start < len(messages):
            (whole, others), written, count = read_responses(messages, start, self._limits.message_bytes, self._writers)
            counts.messages_received += count or 1
            if whole:
                self._receive_whole(whole)
            for number, kind, response in others:
                self._receive_response(number, kind, response)
            counts.items_received += written + len(whole) + len(others)
            if not count:
                counts.items_received += self._receive_any(messages[start])
            start += count or 1
        if self.draining:
            self.on_draining()

    def retire(self) -> None:
        """Takes no new calls. Running ones or wait go on."""
        self.draining = True

    def lose(self, cause: str, *, has_unwritten: bool = False) -> None:
        """Ends every call because the stream has ended.

        Args:
            cause: Why it has ended.
            has_unwritten: Whether a part of the latest message was not written.
        """
        self.draining = True
        for call in [*self._urgent, *self._short, *self._long]:
            self._fail_unsent(call, cause)
        if has_unwritten:
            for call in self._in_latest_message:
                self._fail_unsent(call, cause)
        for call in list(self._calls.values()):
            self._leave_lane(call)
            self._remove(call)
            self._fail(call, OutcomeUnknown(f"the call stream ended before the answer: {cause}"), "unknown")
        self._end_ping(answered=False)

    def _end_ping(self, *, answered: bool) -> None:
        pong, self.pong = self.pong, None
        if pong is not None and not pong.done():
            pong.set_result(answered)

    def _why_not(self, method: str, size: int) -> str:
        if self.draining:
            return "the server is stopping"
        if method not in self._methods:
            return f"the server does not serve {method} on its call stream"
        return f"the server accepts requests of at most {self._max_request_bytes} bytes, this one has {size}"

    def _encoded_part(self, call: RunningCall) -> tuple[bytes, memoryview]:
        """Returns the next part of a long request as an encoded field of a message, its bytes as a view.

        In a protobuf message they would be copied three times before the message is written.
        """
        start = call.sent_bytes
        call.sent_bytes = end = start + self._part_bytes
        if not call.number:
            self._number(call)
        request, is_last = memoryview(call.request)[start:end], end >= len(call.request)
        item = CallRequest(number=call.number, more=not is_last)
        if not start:
            item.method, item.trace_context = call.method, call.trace
            if (left := call.time_left_ms()) is not None:
                item.time_left_ms = left
        if is_last:
            self._in_latest_message.append(call)
            self._leave_lane(call)
        head = item.SerializeToString() + _REQUEST_TAG + encode_varint(len(request))
        return _CALLS_TAG + encode_varint(len(head) + len(request)) + head, request

    def _number(self, call: RunningCall) -> None:
        self._last_number += 1
        call.number = self._last_number
        self._calls[call.number] = call

    def _leave_lane(self, call: RunningCall) -> None:
        """Forgets the request of a sent or abandoned call."""
        if call.lane is not None:
            del call.lane[call]
            call.lane = None
            self._queued_bytes -= len(call.request)
            call.request = b""

    def _running(self, number: int) -> RunningCall:
        call = self._calls.get(number)
        if call is None:
            raise ProtocolViolation("unknown_call", f"received a response to call {number}, which is not running")
        return call

    def _defect(self, call: RunningCall) -> None:
        """Ends a call whose receiver has failed: a defect in one must not end the others."""
        log.exception("call.receiver_failed", call=call.number)
        call.cancel()

    def _receive_any(self, encoded: bytes) -> int:
        """Processes a message that may have more than responses. Returns their number."""
        if encoded == _PONG:
            self._spend(_ITEMS_OF_EMPTY_MESSAGE)
            self._end_ping(answered=True)
            return 0
        message = parse(OpenCallStreamResponse, encoded, self._limits)
        if "server_hello" in message:
            raise ProtocolViolation("hello", "expected one hello on a stream, received another")
        numbers, whole, others = message.whole_numbers[:], message.whole_responses[:], message.responses[:]
        if not numbers and not others:
            self._spend(_ITEMS_OF_EMPTY_MESSAGE)
        if len(numbers) != len(whole):
            raise ProtocolViolation(
                "columns", f"expected as many whole responses as numbers, received {len(whole)} and {len(numbers)}"
            )
        self._receive_whole(zip(numbers, whole, strict=True))
        for item in others:
            failure = item.failure if item.kind == _FAILED else None
            self._receive_response(item.number, item.kind, item.response, failure)
        if "draining" in message:
            self._drain(message.draining.last_call)
        if "pong" in message:
            self._end_ping(answered=True)
        return len(numbers) + len(others)

    def _receive_whole(self, responses: Iterable[tuple[int, bytes]]) -> None:
        calls = self._calls
        for number, response in responses:
            call = calls.get(number) or self._running(number)
            receiver = call.receiver
            if receiver is None or not response:
                self._spend(1)
            if receiver is not None:
                try:
                    self._pass_on(call, receiver, response)
                except Exception:
                    self._defect(call)

    def _pass_on(self, call: RunningCall, receiver: ResponseReceiver, response: bytes) -> None:
        """Passes a response on. Offers the following ones to the writer that its receiver returns, if any."""
        writer = receiver.on_response(response)
        if writer is None or call.receiver is None:
            self._writers.pop(call.number, None)
        else:
            self._writers[call.number] = writer

    def _receive_response(self, number: int, kind: int, response: bytes, failure: CallFailure | None = None) -> None:
        call = self._calls.get(number) or self._running(number)
        try:
            self._take(call, kind, response, failure)
        except ProtocolViolation:
            raise
        except Exception:
            self._defect(call)

    def _take(self, call: RunningCall, kind: int, response: bytes, failure: CallFailure | None) -> None:
        """Processes a response: a part, the rest after parts, or the end of its call."""
        if kind == _PART:
            self._take_part(call, response)
            return
        if self._unfinished.bytes:
            response = b"".join((*self._unfinished.remove(call.number), response))
        if kind not in _WHOLE_KINDS:
            raise ProtocolViolation("unknown_kind", f"received a response of kind {kind}, which is not defined")
        if not kind and (call.receiver is None or not response):
            self._spend(1)
        try:
            if call.receiver is not None and (kind == _LAST or not kind):
                self._pass_on(call, call.receiver, response)
        finally:
            # Also if the receiver fails. It may have cancelled the call, too.
            receiver = self._end(call) if kind else None
        if receiver is None:
            return
        if failure is not None:
            error = from_parts(failure.code, failure.message, failure.info)
            self.counts.failed[error.code.name] += 1
            receiver.on_error(error)
        else:
            receiver.on_end()

    def _take_part(self, call: RunningCall, part: bytes) -> None:
        if len(part) < _LEAST_PART_BYTES or call.receiver is None:
            self._spend(1)
        if call.receiver is None:
            return
        size, limits = self._unfinished.add(call.number, part), self._limits
        if size > limits.response_bytes or self._unfinished.bytes > limits.parted_bytes:
            receiver = call.receiver
            reason = (
                f"the response is longer than the {limits.response_bytes} bytes that are accepted"
                if size > limits.response_bytes
                else f"more than {limits.parted_bytes} bytes of responses on the stream are unfinished"
            )
            call.cancel()
            receiver.on_error(TooMuchUnread(reason))

    def _remove(self, call: RunningCall) -> None:
        """Removes a call that the server does not run any more."""
        self._calls.pop(call.number, None)
        self._forget_output(call)

    def _forget_output(self, call: RunningCall) -> None:
        """Forgets what waits for further output of a call, or is offered it."""
        self._writers.pop(call.number, None)
        self._unfinished.remove(call.number)

    def _spend(self, items: int) -> None:
        if not self._flood.spend(items):
            raise ProtocolViolation("flood", "received many messages or responses that serve no running call")

    def _end(self, call: RunningCall) -> ResponseReceiver | None:
        """Removes a call the server has ended. Returns its receiver; None if it was cancelled."""
        self._remove(call)
        receiver = call.release()
        if receiver is not None:
            self.counts.running -= 1
        if call.lane is not None:
            # The server refused it after some of its parts, and expects the others unless it is cancelled.
            self._leave_lane(call)
            self._cancelled.append(call.number)
            self._wake()
        return receiver

    def _drain(self, last_call: int) -> None:
        if last_call > self._last_number:
            raise ProtocolViolation(
                "unknown_call", f"the last call is {last_call}, but only {self._last_number} were sent"
            )
        if self._drained:
            raise ProtocolViolation("draining_twice", "expected one notice that the server stops, received another")
        self.draining = self._drained = True
        for call in [*self._urgent, *self._short, *self._long]:
            if not 0 < call.number <= last_call:
                self._fail_unsent(call, "the server is stopping")
        for call in [call for number, call in self._calls.items() if number > last_call]:
            self._fail_unsent(call, "the server is stopping")

    def _fail_unsent(self, call: RunningCall, cause: str) -> None:
        self._leave_lane(call)
        self._remove(call)
        self._fail(call, NotSent(f"the call was not sent: {cause}"), "not_sent")

    def _fail(self, call: RunningCall, error: KvRouterError, outcome: str) -> None:
        receiver = call.release()
        if receiver is None:
            return
        self.counts.running -= 1
        self.counts.failed[outcome] += 1
        try:
            receiver.on_error(error)
        except Exception:
            log.exception("call.receiver_failed", call=call.number)
