"""Runs the server of HTTP/2 on what a client sends, and checks what must hold whatever that is."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import grpc
from kvrouter.net.http2.frames import PREFACE
from kvrouter.net.http2.options import CONNECTION_CALLS
from kvrouter.net.http2.received_call import MESSAGE_BYTES, Received, ReceivedCall
from kvrouter.net.http2.received_calls import ReceivedCalls
from kvrouter.net.http2.side import Flood, Http2Violation

from .http2_scripts import corpus, cut, frames_of, random_script

ANSWER = bytes(30_000)


async def run_client_script(chunks: list[bytes], *, finishes: bool) -> type[Http2Violation] | None:
    """Feeds the server, whose handlers answer each message and may finish calls; returns the client's violation."""
    received = Received()
    tasks: list[asyncio.Task[None]] = []

    async def serve(call: ReceivedCall) -> None:
        while await call.read() is not grpc.aio.EOF:
            await call.write(ANSWER)
        if finishes:
            call.finish()

    def begin(call: ReceivedCall) -> None:
        tasks.append(asyncio.create_task(serve(call)))
        call.on_cancelled = tasks[-1].cancel

    side = ReceivedCalls(received, begin)
    written, violation = side.take(), None
    for chunk in chunks:
        try:
            side.receive(chunk)
        except Http2Violation as error:
            violation = type(error)
            break
        await asyncio.sleep(0)
        written += side.take()
        assert len(side.calls) <= CONNECTION_CALLS
        assert received.bytes == sum(map(unread_bytes, side.calls.values()))
    for call in list(side.calls.values()):
        call.cancelled()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task
    written += side.take()
    assert not side.calls
    assert received.bytes == 0, "what a connection held is free"
    assert b"".join(frames_of(written)) == written
    return violation


def unread_bytes(call: ReceivedCall) -> int:
    """Returns the size of what a call holds."""
    return sum(len(message) + MESSAGE_BYTES for message in call._messages) + len(call._reader.begun)


def fuzz_server(seed: int) -> None:
    """Feeds a random script whole and cut anywhere. Both must break the same rule, or none."""
    rng = random.Random(seed)
    sent = random_script(rng, list(corpus("http2").values()))
    if rng.random() < 0.95:
        sent = PREFACE + sent
    whole = asyncio.run(run_client_script([sent], finishes=False))
    parted = asyncio.run(run_client_script(list(cut(rng, sent)), finishes=False))
    asyncio.run(run_client_script(list(cut(rng, sent)), finishes=True))
    if Flood not in (whole, parted):  # Small reads are a part of the budget.
        assert parted is whole
