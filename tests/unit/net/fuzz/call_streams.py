"""Runs both sides of call streams on messages of any kind in any order, and checks what must hold whatever they are."""

from __future__ import annotations

import random

import grpc
from google.protobuf.message import Message
from kvrouter.net.calls.client_stream import ClientStream
from kvrouter.net.calls.errors import NotSent, ProtocolViolation
from kvrouter.net.calls.limits import CallLimits, CallStreamCounts
from kvrouter.net.calls.running_call import RunningCall
from kvrouter.net.calls.server_call import ServerCall
from kvrouter.v1.calls_pb2 import (
    CallFailure,
    CallRequest,
    CallResponse,
    CallStreamClientHello,
    CallStreamDraining,
    CallStreamServerHello,
    OpenCallStreamRequest,
    OpenCallStreamResponse,
)
from kvrouter.v1.errors import KvRouterError

from ..calls.linked import ECHO, LATER, TOKENS, Linked, Received
from .http2_scripts import corpus

LIMITS = CallLimits(message_bytes=64 << 10, part_bytes=1 << 10, calls=20, response_bytes=8 << 10, parted_bytes=16 << 10)
HELLO = CallStreamServerHello(
    version=1, methods=[ECHO, TOKENS, LATER], max_message_bytes=64 << 10, max_calls=1000, max_request_bytes=1 << 20
)


def _number(rng: random.Random, last: int) -> int:
    if last and rng.random() < 0.85:
        return rng.randint(1, last)
    return rng.choice([0, last + 1, last + 2, (1 << 64) - 1])


def _content(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice([0, 0, 1, 300, 3_000, 20_000]))


def random_response(rng: random.Random, last: int) -> bytes:
    message = OpenCallStreamResponse()
    for _ in range(rng.randint(0, 3)):
        number, kind = _number(rng, last), rng.choice([0, 1, 2, 2, 2, 3, 4, 4, 5])
        message.responses.append(CallResponse(number=number, response=_content(rng), kind=kind))  # type: ignore[arg-type]
        if kind == 4:
            message.responses[-1].failure.CopyFrom(
                CallFailure(code=rng.randint(-1, 20), message="x" * rng.randrange(99))
            )
    for _ in range(rng.randint(0, 3)):
        message.whole_numbers.append(_number(rng, last))
        message.whole_responses.append(_content(rng))
    if rng.random() < 0.03:
        message.whole_numbers.append(1)
    if rng.random() < 0.03:
        message.draining.CopyFrom(CallStreamDraining(last_call=_number(rng, last)))
    if rng.random() < 0.02:
        message.server_hello.CopyFrom(HELLO)
    return _damaged(rng, message)


def random_request(rng: random.Random, last: int) -> bytes:
    message = OpenCallStreamRequest()
    following = last
    for _ in range(rng.randint(0, 4)):
        following += rng.random() < 0.8
        number = following if rng.random() < 0.95 else _number(rng, last)
        message.calls.append(
            CallRequest(
                number=number,
                method=rng.choice([0, 1, 2, 3, (1 << 32) - 1]),
                request=_content(rng),
                more=rng.random() < 0.3,
                time_left_ms=rng.choice([None, 0, 1, (1 << 32) - 1]),
                trace_context="x" * rng.choice([0, 55, 999]),
            )
        )
    message.cancelled.extend(_number(rng, last) for _ in range(rng.choice([0, 0, 1, 3])))
    if rng.randrange(3):
        message.ping = rng.choice([0, 1])
    if rng.random() < 0.02:
        message.client_hello.CopyFrom(CallStreamClientHello(version=rng.randrange(3)))
    return _damaged(rng, message)


def _damaged(rng: random.Random, message: Message) -> bytes:
    encoded = bytearray(message.SerializeToString())
    if encoded and rng.random() < 0.05:
        encoded[rng.randrange(len(encoded))] = rng.randrange(256)
    if rng.random() < 0.02:
        return rng.randbytes(rng.randrange(200))
    return bytes(encoded[: rng.randrange(len(encoded) + 1)] if rng.random() < 0.02 else encoded)


def fuzz_client_stream(seed: int) -> None:
    """A server sends anything. Each call ends once, and nothing is kept of calls that have ended."""
    rng = random.Random(seed)
    stream = ClientStream(HELLO, LIMITS, CallStreamCounts(), lambda: None)
    seeds = list(corpus("responses").values())
    calls: list[tuple[RunningCall, Received]] = []
    cancelled: set[RunningCall] = set()
    try:
        for _ in range(rng.randint(1, 60)):
            _use_client(rng, stream, calls, cancelled)
            last = stream._last_number
            stream.receive([rng.choice(seeds) if rng.random() < 0.05 else random_response(rng, last)])
            unfinished = stream._unfinished
            assert unfinished.bytes == sum(each.size for each in unfinished.by_number.values())
            assert unfinished.bytes <= LIMITS.parted_bytes + LIMITS.message_bytes
            assert unfinished.by_number.keys() <= stream._calls.keys()
    except ProtocolViolation:
        pass
    stream.lose("the end", has_unwritten=rng.random() < 0.5)
    assert stream.running == stream.counts.running == stream._queued_bytes == stream._unfinished.bytes == 0
    for call, received in calls:
        assert received.outcomes == (call not in cancelled)


def _use_client(
    rng: random.Random, stream: ClientStream, calls: list[tuple[RunningCall, Received]], cancelled: set[RunningCall]
) -> None:
    for _ in range(rng.randint(0, 2)):
        received = Received()
        try:
            running = stream.start(rng.choice([ECHO, TOKENS]), _content(rng), received, urgent=rng.random() < 0.1)
        except NotSent:
            continue
        calls.append((running, received))
    if rng.random() < 0.8:
        stream.next_message()
    if calls and rng.random() < 0.2:
        call, received = rng.choice(calls)
        if not received.outcomes:
            cancelled.add(call)
        call.cancel()


def fuzz_server_stream(seed: int) -> None:
    """A client sends anything. Each call that begins ends once, and the stream ends with nothing running."""
    rng = random.Random(seed)
    linked = Linked(LIMITS)
    server = linked.server
    seeds = list(corpus("requests").values())
    try:
        for _ in range(rng.randint(1, 60)):
            server.receive(rng.choice(seeds) if rng.random() < 0.05 else random_request(rng, server._last_number))
            _use_server(rng, linked)
            while (message := server.next_message()) is not None:
                assert len(message) <= LIMITS.message_bytes
                OpenCallStreamResponse.FromString(message)
    except ProtocolViolation:
        pass
    server.lose()
    assert server.running == 0
    assert all(call.ended for _, call in linked.streaming)


def _use_server(rng: random.Random, linked: Linked) -> None:
    going_on: list[ServerCall] = [call for _, call in linked.streaming if not call.ended]
    for call in going_on:
        match rng.randrange(6):
            case 0:
                call.respond(_content(rng))
            case 1:
                call.end(b"last")
            case 2:
                call.fail(KvRouterError("refused", code=rng.choice(list(grpc.StatusCode))))
            case _:
                pass
