"""Call streams over connections that stall, break and close halfway, against a model of what must have been delivered.

The model knows for each call what its caller sent and what its handler responded. Whatever the order in which messages
are written, carried and lost, every call must end once and in accordance with that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import grpc
from hypothesis import settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule
from kvrouter.net.calls.errors import CallTimedOut, NotSent, OutcomeUnknown
from kvrouter.net.calls.limits import CallLimits
from kvrouter.net.calls.running_call import RunningCall
from kvrouter.net.calls.server_call import ServerCall
from kvrouter.v1.errors import KvRouterError

from .linked import ECHO, TOKENS, Linked, Received

LIMITS = CallLimits(message_bytes=64 << 10, part_bytes=8 << 10, calls=200)
SIZES = st.sampled_from([8, 100, 8 << 10, (8 << 10) + 1, 30_000, 150_000])


@dataclass
class Call:
    """What the model knows of one call."""

    request: bytes
    received: Received
    running: RunningCall
    responses: list[bytes] = field(default_factory=list)
    """What the handler responded before the call ended there."""
    failed: bool = False
    """Whether the handler refused it."""
    ended: bool = False
    """Whether the handler ended it."""
    cancelled: bool = False
    """Whether the caller cancelled it, or its time was up."""


class Streams(RuleBasedStateMachine):
    """Writes, carries and loses the messages of one stream in any order."""

    calls: Bundle[int] = Bundle("calls")

    def __init__(self) -> None:
        super().__init__()
        self.linked = Linked(LIMITS)
        self.model: dict[int, Call] = {}
        self.to_server: deque[bytes] = deque()
        self.to_client: deque[bytes] = deque()
        self.lost = False
        self.draining = False

    def _start(self, method: str, size: int, *, urgent: bool) -> int | None:
        number = len(self.model) + 1
        request = number.to_bytes(8, "little") * (size // 8)
        received = Received()
        try:
            running = self.linked.client.start(method, request, received, urgent=urgent)
        except NotSent:
            assert self.lost or self.linked.client.draining
            return None
        self.model[number] = Call(request, received, running)
        return number

    @rule(target=calls, method=st.sampled_from([ECHO, TOKENS]), size=SIZES, urgent=st.booleans())
    def start(self, method: str, size: int, urgent: bool) -> object:
        number = self._start(method, size, urgent=urgent)
        return multiple() if number is None else number

    @rule(number=consumes(calls), in_time=st.booleans())
    def cancel(self, number: int, in_time: bool) -> None:
        call = self.model[number]
        if call.received.outcomes:
            call.running.cancel()
            return
        call.cancelled = True
        if in_time:
            call.running.cancel()
        else:
            self.linked.client.time_out(call.running)
            assert isinstance(call.received.errors[-1], CallTimedOut)

    def _call_of(self, request: bytes) -> Call:
        return self.model[int.from_bytes(request[:8], "little")]

    def _running(self) -> list[tuple[Call, ServerCall]]:
        return [(self._call_of(request), call) for request, call in self.linked.streaming if not call.ended]

    @precondition(lambda self: self._running())
    @rule(data=st.data(), size=SIZES)
    def respond(self, data: st.DataObject, size: int) -> None:
        model, call = data.draw(st.sampled_from(self._running()))
        response = len(model.responses).to_bytes(8, "little") * (size // 8)
        call.respond(response)
        model.responses.append(response)

    @precondition(lambda self: self._running())
    @rule(data=st.data(), how=st.sampled_from(["end", "last", "fail"]))
    def finish(self, data: st.DataObject, how: str) -> None:
        model, call = data.draw(st.sampled_from(self._running()))
        model.ended = True
        if how == "end":
            call.end()
        elif how == "last":
            call.end(b"last")
            model.responses.append(b"last")
        else:
            model.failed = True
            call.fail(KvRouterError("refused", code=grpc.StatusCode.ABORTED))

    @rule()
    def write_request(self) -> None:
        message = None if self.lost else self.linked.client.next_message()
        if message is not None:
            assert len(message) <= LIMITS.message_bytes
            self.to_server.append(message)

    @rule()
    def write_response(self) -> None:
        message = None if self.lost else self.linked.server.next_message()
        if message is not None:
            assert len(message) <= LIMITS.message_bytes
            self.to_client.append(message)

    @rule()
    def carry_request(self) -> None:
        if self.to_server:
            self.linked.server.receive(self.to_server.popleft())

    @rule()
    def carry_response(self) -> None:
        if self.to_client:
            self.linked.client.receive([self.to_client.popleft()])

    @rule()
    def carry_all_requests(self) -> None:
        self.write_request()
        while self.to_server:
            self.carry_request()

    @rule()
    def carry_all_responses(self) -> None:
        self.write_response()
        while self.to_client:
            self.carry_response()

    @rule()
    def ping(self) -> None:
        self.linked.client.ping()

    @precondition(lambda self: len(self.model) > 2)
    @rule()
    def drain(self) -> None:
        """The server stops, or the client has closed its sending side, which means the same to the server."""
        self.draining = True
        self.linked.server.drain()

    @precondition(lambda self: len(self.model) > 3)
    @rule()
    def lose(self) -> None:
        self.lost = True
        self.to_server.clear()
        self.to_client.clear()
        self.linked.client.lose("cut")
        self.linked.server.lose()

    @invariant()
    def calls_end_at_most_once_with_what_their_handlers_responded(self) -> None:
        executed = {bytes(each) for each in self.linked.executed}
        assert len(executed) == len(self.linked.executed), "a call ran twice"
        for call in self.model.values():
            self._check(call, executed)

    def _check(self, call: Call, executed: set[bytes]) -> None:
        received = call.received
        assert received.outcomes <= 1
        ran = call.request in executed
        echoed = ran and call.request not in {request for request, _ in self.linked.streaming}
        expected = [call.request] if echoed else call.responses
        assert received.responses == expected[: len(received.responses)]
        if received.ended:
            assert ran
            assert received.responses == expected
            assert echoed or (call.ended and not call.failed)
        for error in received.errors:
            if isinstance(error, NotSent):
                assert not ran, "a call that was reported as not sent was run"
            elif isinstance(error, OutcomeUnknown):
                assert self.lost
            elif not isinstance(error, CallTimedOut):
                assert call.failed
                assert received.responses == expected

    def teardown(self) -> None:
        """Carries all that is left. Every call ends on both sides, except those whose handlers go on."""
        while not self.lost:
            for _ in range(3):
                self.write_request()
                self.write_response()
            if not self.to_server and not self.to_client:
                break
            while self.to_server:
                self.carry_request()
            while self.to_client:
                self.carry_response()
        self.calls_end_at_most_once_with_what_their_handlers_responded()
        going_on = [model for model, _ in self._running()]
        assert len(going_on) == self.linked.server.running
        streamed = dict(self.linked.streaming)
        for call in self.model.values():
            assert self.linked.aborted.count(call.request) == self._must_be_aborted(call, streamed)
            if call.cancelled:
                assert call.received.outcomes == len(call.received.errors)
                server_call = streamed.get(call.request)
                assert server_call is None or server_call.ended
            else:
                assert call.received.outcomes == (call not in going_on)
        if not self.lost:
            assert self.linked.client.running == len(going_on)
            assert self.linked.client._queued_bytes == 0
            assert self.linked.client.counts.running == len(going_on)
        if self.draining and not self.lost and not going_on:
            assert self.linked.server.drained

    def _must_be_aborted(self, call: Call, streamed: dict[bytes, ServerCall]) -> bool:
        """Returns whether the call began at the server and its handler did not end it."""
        return call.request in streamed and not call.ended and (self.lost or call.cancelled)


TestStreams = Streams.TestCase
TestStreams.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
