"""Runs the client of HTTP/2 on what a server sends, and checks what must hold whatever that is."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import grpc
from kvrouter.net.http2.frames import PREFACE
from kvrouter.net.http2.http2_call import Http2Call
from kvrouter.net.http2.side import Flood, Http2Violation

from .http2_scripts import corpus, cut, frames_of, random_script

MESSAGE_BYTES = 20_000


@dataclass
class Outcome:
    """What came of a script."""

    received: list[bytes] = field(default_factory=list)
    ended: tuple[grpc.StatusCode, str] | None = None
    violation: Http2Violation | None = None


def run_script(chunks: list[bytes], sent_by_client: int) -> Outcome:
    """Feeds the client, which sends messages meanwhile. Anything but a violation of the server is a defect."""
    outcome = Outcome()
    call = Http2Call("/a.B/C", "host:1", "http", max_message_bytes=MESSAGE_BYTES)
    call.on_messages = outcome.received.extend
    written = call.take()
    for index, chunk in enumerate(chunks):
        if index < sent_by_client and not call.blocked:
            call.send(bytes(30_000))
        try:
            call.receive(chunk)
        except Http2Violation as violation:
            outcome.violation = violation
            break
        written += call.take()
        assert call.ended is not None or len(call._unread) < 9 + (1 << 14)
        assert len(call._messages.begun) <= MESSAGE_BYTES + 5 + (1 << 14)
    outcome.ended = call.ended
    call.cancel()
    written += call.take()
    assert written.startswith(PREFACE)
    assert b"".join(frames_of(written[len(PREFACE) :])) == written[len(PREFACE) :]
    assert all(len(each) <= MESSAGE_BYTES for each in outcome.received)
    return outcome


def fuzz_client(seed: int) -> None:
    """Feeds a random script whole and cut anywhere. Both must come to the same end."""
    rng = random.Random(seed)
    sent = random_script(rng, list(corpus("http2").values()))
    whole = run_script([sent], 0)
    parted = run_script(list(cut(rng, sent)), 0)
    run_script(list(cut(rng, sent)), rng.randint(1, 3))
    if isinstance(whole.violation, Flood) or isinstance(parted.violation, Flood):
        return  # Small reads are a part of the budget.
    assert parted.received == whole.received
    assert parted.ended == whole.ended
    assert type(parted.violation) is type(whole.violation)
