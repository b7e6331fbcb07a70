"""What the two sides of a call stream make of calls, cancels, parts, drains and losses."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from kvrouter.core import Observations, TokenWriter
from kvrouter.net.calls.client_stream import ClientStream
from kvrouter.net.calls.errors import CallTimedOut, NotSent, OutcomeUnknown, ProtocolViolation
from kvrouter.net.calls.limits import SPARSE_PINGS, CallLimits, CallStreamCounts
from kvrouter.net.calls.server_stream import ServerStream
from kvrouter.v1.calls_pb2 import (
    CallResponse,
    CallResponseKind,
    CallStreamClientHello,
    CallStreamDraining,
    CallStreamServerHello,
    OpenCallStreamRequest,
    OpenCallStreamResponse,
)
from kvrouter.v1.errors import KvRouterError, NotFound, TooMuchUnread
from kvrouter.v1.worker_pb2 import GenerateOutput, WorkerServiceGenerateResponse

from .linked import ECHO, LATER, TOKENS, Linked, Received


def test_a_unary_call_is_answered_once() -> None:
    linked = Linked()
    _, received = linked.start(ECHO, b"hello")
    linked.carry()
    assert (received.responses, received.ended, received.errors) == ([b"hello"], 1, [])
    assert linked.client.running == linked.server.running == 0


def test_an_empty_response_is_a_response() -> None:
    linked = Linked()
    _, received = linked.start(ECHO)
    linked.carry()
    assert (received.responses, received.ended) == ([b""], 1)


def test_what_waits_together_travels_in_one_message() -> None:
    linked = Linked()
    received = [linked.start(ECHO, bytes([index]))[1] for index in range(100)]
    linked.carry()
    assert len(linked.to_server) == len(linked.to_client) == 1
    assert [each.responses for each in received] == [[bytes([index])] for index in range(100)]


def test_the_responses_of_a_call_keep_their_order() -> None:
    linked = Linked()
    _, received = linked.start(TOKENS)
    linked.carry()
    ((_, call),) = linked.streaming
    for index in range(300):
        call.respond(bytes([index % 256]))
    call.end(b"last")
    linked.answer()
    assert received.responses == [*(bytes([index % 256]) for index in range(300)), b"last"]
    assert received.ended == 1


@pytest.mark.parametrize("size", [0, 1, 65_536, 65_537, 300_000, 3_000_000])
def test_requests_and_responses_of_any_size_arrive_in_messages_below_the_bound(size: int) -> None:
    linked = Linked()
    request = bytes(index % 251 for index in range(size))
    _, received = linked.start(ECHO, request)
    linked.carry()
    assert received.responses == [request]
    assert received.ended == 1
    assert max(map(len, [*linked.to_server, *linked.to_client])) <= 256 << 10


def test_short_and_urgent_calls_overtake_a_long_one_which_still_advances() -> None:
    linked = Linked()
    _, long = linked.start(ECHO, b"l" * 1_000_000)
    shorts = [linked.start(ECHO, b"s" * 60_000)[1] for _ in range(20)]
    _, urgent = linked.start(ECHO, b"urgent", urgent=True)
    first = linked.client.next_message()
    assert first is not None
    calls = OpenCallStreamRequest.FromString(first).calls
    assert calls[0].request == b"urgent"
    assert calls[-1].request.startswith(b"l")
    linked.server.receive(first)
    linked.carry()
    assert all(each.ended == 1 for each in (long, urgent, *shorts))


def test_a_long_response_in_parts_keeps_its_place_among_the_responses_of_its_call() -> None:
    linked = Linked()
    _, received = linked.start(TOKENS)
    linked.carry()
    ((_, call),) = linked.streaming
    expected = [b"a", b"b" * 1_000_000, b"c"]
    for each in expected:
        call.respond(each)
    call.end()
    linked.answer()
    assert (received.responses, received.ended) == (expected, 1)


def test_a_cancel_reaches_the_server_and_the_call_is_answered_once() -> None:
    linked = Linked()
    running, received = linked.start(TOKENS)
    linked.carry()
    ((_, call),) = linked.streaming
    cancelled: list[bool] = []
    call.on_cancelled = lambda: cancelled.append(True)
    call.respond(b"in flight")
    running.cancel()
    linked.carry()
    assert cancelled == [True]
    assert call.ended
    call.respond(b"too late")
    call.end()
    linked.answer()
    assert received.responses == []
    assert received.outcomes == 0
    assert linked.client.running == linked.server.running == 0


def test_a_call_cancelled_before_it_is_sent_never_reaches_the_server() -> None:
    linked = Linked()
    running, received = linked.start(ECHO, b"x")
    running.cancel()
    linked.carry()
    assert (linked.executed, received.outcomes, linked.to_server) == ([], 0, [])


def test_a_call_cancelled_between_its_parts_is_not_run() -> None:
    linked = Linked()
    running, _ = linked.start(ECHO, b"x" * 1_000_000)
    message = linked.client.next_message()
    assert message is not None
    linked.server.receive(message)
    running.cancel()
    linked.carry()
    assert linked.executed == []
    assert linked.client.running == linked.server.running == 0


def test_a_timed_out_call_is_cancelled() -> None:
    linked = Linked()
    running, received = linked.start(LATER, b"x")
    linked.carry()
    linked.client.time_out(running)
    linked.carry()
    assert isinstance(received.errors[0], CallTimedOut)
    assert linked.later[0].ended
    assert linked.client.running == 0


def test_when_the_stream_is_lost_each_call_learns_whether_it_was_sent() -> None:
    linked = Linked()
    _, answered = linked.start(ECHO, b"answered")
    linked.carry()
    _, sent = linked.start(ECHO, b"sent")
    linked.send()
    _, long = linked.start(ECHO, b"l" * 1_000_000)
    message = linked.client.next_message()
    assert message is not None
    linked.server.receive(message)
    _, waiting = linked.start(ECHO, b"waiting")
    linked.client.lose("the network is gone")
    linked.server.lose()
    assert answered.ended == 1
    assert isinstance(sent.errors[0], OutcomeUnknown)
    assert isinstance(long.errors[0], NotSent)
    assert isinstance(waiting.errors[0], NotSent)
    assert linked.executed == [b"answered", b"sent"]
    assert linked.client.running == 0
    with pytest.raises(NotSent):
        linked.start(ECHO)


def test_a_lost_stream_cancels_its_calls_on_the_server() -> None:
    linked = Linked()
    linked.start(TOKENS)
    linked.carry()
    ((_, call),) = linked.streaming
    cancelled: list[bool] = []
    call.on_cancelled = lambda: cancelled.append(True)
    linked.server.lose()
    assert cancelled == [True]
    call.respond(b"nobody reads this")
    assert linked.server.next_message() is None


def test_a_draining_server_finishes_what_runs_and_reports_the_rest_as_not_sent() -> None:
    linked = Linked()
    _, running = linked.start(TOKENS)
    linked.carry()
    linked.server.drain()
    drain = linked.server.next_message()
    assert drain is not None
    _, late = linked.start(ECHO, b"late")
    linked.send()
    linked.client.receive([drain])
    assert isinstance(late.errors[0], NotSent)
    with pytest.raises(NotSent):
        linked.start(ECHO)
    assert not linked.server.drained
    linked.streaming[0][1].end(b"done")
    linked.answer()
    assert running.responses == [b"done"]
    assert linked.executed == [b""]
    assert linked.server.drained


def test_an_error_of_a_handler_ends_only_its_call() -> None:
    def fail(raw: bytes) -> bytes:
        if raw == b"refuse":
            raise NotFound("no such thing")
        if raw == b"defect":
            raise ZeroDivisionError
        return raw

    linked = Linked(unary=fail)
    _, refused = linked.start(ECHO, b"refuse")
    _, defect = linked.start(ECHO, b"defect")
    _, fine = linked.start(ECHO, b"fine")
    linked.carry()
    (error,) = refused.errors
    assert isinstance(error, KvRouterError)
    assert (error.code, str(error)) == (grpc.StatusCode.NOT_FOUND, "no such thing")
    (error,) = defect.errors
    assert isinstance(error, KvRouterError)
    assert error.code == grpc.StatusCode.INTERNAL
    assert fine.ended == 1


class Writing(Received):
    """Returns a writer, which may take a number of tokens."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.written: dict[asyncio.Transport, list[bytes]] = {}
        protocol = SimpleNamespace(writing_paused=False)
        self.writer = TokenWriter(self.written, lambda: None, asyncio.Transport(), protocol, b"", b"", are_chunks=False)
        self.writer.worker = SimpleNamespace(pieces=0, missed=0)
        self.writer.begin(limit, 0, Observations([1]), int)
        self.writer.limit = limit

    def on_response(self, encoded: bytes) -> TokenWriter:  # type: ignore[override]
        super().on_response(encoded)
        return self.writer

    @property
    def tokens(self) -> list[bytes]:
        return [token for tokens in self.written.values() for token in tokens]


def token(number: int) -> bytes:
    return WorkerServiceGenerateResponse(output=GenerateOutput(token_ids=[number])).SerializeToString()


def _whole(response: bytes) -> bytes:
    return OpenCallStreamResponse(whole_numbers=[1], whole_responses=[response]).SerializeToString()


def test_responses_are_offered_to_the_writer_of_their_call_and_refused_ones_are_received() -> None:
    linked, received = Linked(), Writing(limit=2)
    linked.client.start(TOKENS, b"", received)
    linked.carry()
    ((_, call),) = linked.streaming
    for number in range(5):
        call.respond(token(number))
        linked.answer()
    call.respond(b"more")
    call.end()
    linked.answer()
    assert received.tokens == [b"1", b"2"]
    assert received.responses == [token(0), token(3), token(4), b"more"]
    assert received.ended == 1
    assert linked.client.counts.items_received == 7
    assert not linked.client._writers


@pytest.mark.parametrize("ends", ["cancel", "drain", "lose"])
def test_the_writer_of_a_call_that_has_ended_takes_nothing(ends: str) -> None:
    linked, received = Linked(), Writing(limit=9)
    running = linked.client.start(TOKENS, b"", received)
    linked.carry()
    ((_, call),) = linked.streaming
    call.respond(token(0))
    linked.answer()
    assert linked.client._writers
    if ends == "cancel":
        running.cancel()
    elif ends == "drain":
        linked.client.receive([OpenCallStreamResponse(draining=CallStreamDraining(last_call=0)).SerializeToString()])
    else:
        linked.client.lose("test")
    call.respond(token(1))
    with nullcontext() if ends == "cancel" else pytest.raises(ProtocolViolation, match="not running"):
        linked.answer()
    assert not received.tokens
    assert not linked.client._writers


@pytest.mark.parametrize("field", [{"pong": 1}, {"responses": [CallResponse(number=1, response=token(1))]}], ids=str)
def test_a_call_without_a_writer_any_more_receives_all_responses(field: dict[str, Any]) -> None:
    class Once(Writing):
        def on_response(self, encoded: bytes) -> TokenWriter | None:  # type: ignore[override]
            writer = super().on_response(encoded)
            return None if len(self.responses) > 1 else writer

    linked, received = Linked(), Once(limit=9)
    linked.client.start(TOKENS, b"", received)
    linked.carry()
    has_whole = "responses" not in field
    second = OpenCallStreamResponse(whole_numbers=[1] * has_whole, whole_responses=[token(1)] * has_whole, **field)
    for message in (_whole(token(0)), second.SerializeToString(), _whole(token(2))):
        linked.client.receive([message])
    assert received.responses == [token(number) for number in range(3)]
    assert not received.tokens


@pytest.mark.parametrize("kind", [0, CallResponseKind.CALL_RESPONSE_KIND_PART])
def test_a_writer_is_offered_what_follows_a_response_of_any_kind(kind: int) -> None:
    linked, received = Linked(), Writing(limit=9)
    linked.client.start(TOKENS, b"", received)
    linked.carry()
    rest = CallResponse(number=1, response=b"" if kind else token(0))
    parts = [CallResponse(number=1, kind=kind, response=token(0))] if kind else []  # type: ignore[arg-type]
    linked.client.receive([OpenCallStreamResponse(responses=[*parts, rest]).SerializeToString(), _whole(token(1))])
    assert received.responses == [token(0)]
    assert received.tokens == [b"1"]


def test_a_receiver_that_fails_ends_only_its_call() -> None:
    class Failing(Received):
        def on_response(self, encoded: bytes) -> None:
            raise ZeroDivisionError

    linked = Linked()
    linked.client.start(ECHO, b"x", Failing())
    _, fine = linked.start(ECHO, b"fine")
    linked.carry()
    assert fine.ended == 1
    assert linked.client.running == linked.server.running == 0


def test_a_call_of_which_too_much_is_unread_ends_alone() -> None:
    linked = Linked(CallLimits(unread_call_bytes=10_000))
    _, slow = linked.start(TOKENS, b"slow")
    _, other = linked.start(TOKENS, b"other")
    linked.carry()
    calls = dict(linked.streaming)
    aborted: list[bool] = []
    calls[b"slow"].on_cancelled = lambda: aborted.append(True)
    for _ in range(1000):
        calls[b"slow"].respond(b"x" * 1000)
    assert calls[b"slow"].unread_bytes < 12_000
    calls[b"other"].end(b"fine")
    linked.answer()
    assert aborted == [True]
    assert isinstance(slow.errors[0], TooMuchUnread)
    assert other.responses == [b"fine"]


def test_a_stream_of_which_too_much_is_unread_overflows() -> None:
    linked = Linked(CallLimits(unread_stream_bytes=100_000))
    linked.start(TOKENS)
    linked.carry()
    overflowed: list[bool] = []
    linked.server.on_overflow = lambda: overflowed.append(True)
    ((_, call),) = linked.streaming
    while not overflowed:
        call.respond(b"x" * 1000)
    assert call.unread_bytes < 110_000


def test_calls_beyond_the_limit_are_not_sent() -> None:
    linked = Linked(CallLimits(calls=3))
    for _ in range(3):
        linked.start(TOKENS)
    with pytest.raises(NotSent):
        linked.start(TOKENS)


def test_an_unknown_method_is_not_sent() -> None:
    with pytest.raises(NotSent, match=r"test\.Service/Missing"):
        Linked().start("test.Service/Missing")


def test_a_request_above_the_limit_is_not_sent() -> None:
    with pytest.raises(NotSent, match="at most 1000 bytes"):
        Linked(CallLimits(request_bytes=1000)).start(ECHO, b"x" * 1001)


def test_a_ping_is_answered() -> None:
    linked = Linked()
    linked.client.ping()
    linked.send()
    linked.client.heard = False
    linked.answer()
    assert linked.client.heard
    assert linked.server.sends_pings
    assert OpenCallStreamResponse.FromString(linked.to_client[0]).pong == 1


def test_sparse_pings_are_answered_and_oblige_to_nothing() -> None:
    linked = Linked(capabilities=[SPARSE_PINGS])
    for _ in range(3):
        linked.server.tick()
    linked.client.ping()
    linked.send()
    linked.answer()
    assert OpenCallStreamResponse.FromString(linked.to_client[0]).pong == 1
    assert not linked.server.sends_pings
    assert linked.server.idle_ticks == 0


@pytest.mark.parametrize("limit", ["max_message_bytes", "max_calls", "max_request_bytes"])
def test_a_server_states_its_limits(limit: str) -> None:
    hello = CallStreamServerHello(max_message_bytes=1 << 20, max_calls=1, max_request_bytes=1, version=1)
    ClientStream(hello, CallLimits(), CallStreamCounts(), lambda: None)
    hello.ClearField(limit)  # type: ignore[arg-type]
    with pytest.raises(ProtocolViolation, match=limit):
        ClientStream(hello, CallLimits(), CallStreamCounts(), lambda: None)


def test_a_client_may_leave_its_limit_to_the_server_but_not_set_it_to_0() -> None:
    hello = OpenCallStreamRequest(client_hello=CallStreamClientHello(version=1))
    ServerStream(hello, [], CallLimits(), CallStreamCounts(), lambda: None, lambda *_: None)
    hello.client_hello.max_message_bytes = 0
    with pytest.raises(ProtocolViolation, match="max_message_bytes"):
        ServerStream(hello, [], CallLimits(), CallStreamCounts(), lambda: None, lambda *_: None)
