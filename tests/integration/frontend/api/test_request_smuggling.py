"""Requests whose end a proxy and the Frontend might see at different places, and headers that are too large.

Each is sent with a second request behind it. The Frontend must refuse the first one and close the connection, so that
what follows is never taken for a request of another client.
"""

from __future__ import annotations

import asyncio
import json
import re

from kvrouter.runtime.config.settings import ServiceSettings
from kvrouter.runtime.telemetry.health import HealthBoard
from kvrouter.runtime.telemetry.metrics import new_registry, serving_ops

from ..gateway import MODEL, System

SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
BODY = b'{"model": "%s", "prompt": [1], "max_tokens": 1}' % MODEL.encode()
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


def post(*lines: bytes, body: bytes = BODY, start: bytes = b"POST /v1/completions HTTP/1.1") -> bytes:
    head = b"".join(line + b"\r\n" for line in (start, b"Host: x", b"Content-Type: application/json", *lines))
    return head + b"\r\n" + body


LENGTH = b"Content-Length: %d" % len(BODY)
AMBIGUOUS = {
    "length and chunks": post(LENGTH, b"Transfer-Encoding: chunked", body=CHUNKED),
    "chunks and length": post(b"Transfer-Encoding: chunked", b"Content-Length: 0", body=CHUNKED),
    "two lengths that differ": post(LENGTH, b"Content-Length: 0"),
    "two lengths in one header": post(b"Content-Length: %d, 0" % len(BODY)),
    "a signed length": post(b"Content-Length: +%d" % len(BODY)),
    "a negative length": post(b"Content-Length: -1"),
    "a length with letters": post(b"Content-Length: 0x10"),
    "a length beyond 64 bits": post(b"Content-Length: 99999999999999999999999"),
    "a space before the colon": post(b"Content-Length : %d" % len(BODY)),
    "a space within a name": post(b"Transfer Encoding: chunked", LENGTH),
    "a folded header": post(b"X-Folded: a", b" Transfer-Encoding: chunked", LENGTH),
    "a bare line feed": post(LENGTH).replace(b"Host: x\r\n", b"Host: x\n"),
    "a bare carriage return": post(b"X-Return: a\rTransfer-Encoding: chunked", LENGTH),
    "a null in a header": post(b"X-Null: a\0b", LENGTH),
    "chunks that are not the last encoding": post(b"Transfer-Encoding: chunked, identity", body=CHUNKED),
    "two transfer encodings": post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity", body=CHUNKED),
    "an unknown transfer encoding": post(b"Transfer-Encoding: xchunked", LENGTH),
    "a chunk size with a sign": post(b"Transfer-Encoding: chunked", body=b"+" + CHUNKED),
    "a chunk size that overflows": post(b"Transfer-Encoding: chunked", body=b"f" * 17 + b"\r\n" + BODY),
    "a chunk that is longer than its size": post(
        b"Transfer-Encoding: chunked", body=b"2\r\n" + BODY + b"\r\n0\r\n\r\n"
    ),
    "a chunk size without digits": post(b"Transfer-Encoding: chunked", body=b";ext=1\r\n" + CHUNKED),
    "a chunk size in C's notation": post(b"Transfer-Encoding: chunked", body=b"0x" + CHUNKED),
    "a chunk extension with a line feed": post(
        b"Transfer-Encoding: chunked", body=CHUNKED.replace(b"\r\n", b";a\nb\r\n", 1)
    ),
    "a chunk that ends without a line break": post(
        b"Transfer-Encoding: chunked", body=b"%x\r\n%s0\r\n\r\n" % (len(BODY), BODY)
    ),
    "a null after the encoding": post(b"Transfer-Encoding: chunked\0", LENGTH),
    "a name without a colon": post(b"Transfer-Encoding chunked", LENGTH),
    "a name with a tab": post(b"Transfer-Encoding\t: chunked", LENGTH),
    "two hosts": post(b"Host: y", LENGTH),
    "a header of 64 KiB": post(b"X-Long: " + b"a" * (64 << 10), LENGTH),
    "a path of 64 KiB": post(LENGTH, start=b"POST /" + b"a" * (64 << 10) + b" HTTP/1.1"),
    "an unknown version": post(LENGTH, start=b"POST /v1/completions HTTP/9.9"),
}


async def answered(address: str, sent: bytes) -> bytes:
    """Sends bytes and returns all that a server answers until it closes the connection."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(sent)
        async with asyncio.timeout(30):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_ambiguous_requests_are_refused_and_hide_no_second_one(system: System) -> None:
    await system.start_worker(1)
    outcomes = {}
    for name, sent in AMBIGUOUS.items():
        answer = await answered(system.http, sent + SMUGGLED)
        if answer:
            error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
            assert error["type"] == "invalid_request_error", name
            assert error["message"], name
        statuses = re.findall(rb"HTTP/1\.1 (\d{3})", answer)
        outcomes[name] = [int(status) for status in statuses]
    wrong = {
        name: statuses for name, statuses in outcomes.items() if len(statuses) > 1 or not {*statuses} <= {400, 408}
    }
    assert not wrong
    # What was refused has left the Frontend as it was.
    assert b" 200 " in await answered(system.http, post(LENGTH, b"Connection: close"))


async def test_a_flood_of_headers_ends_the_connection_or_is_refused(system: System) -> None:
    await system.start_worker(1)
    many = (b"X-%d: a" % number for number in range(10_000))
    answer = await answered(system.http, post(*many, LENGTH, b"Connection: close"))
    assert re.findall(rb"HTTP/1\.1 (\d{3})", answer) in ([b"400"], [b"431"], [])
    assert not answer or json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


async def statuses(address: str, sent: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", await answered(address, sent))]


async def test_unusual_requests_that_are_clear_end_where_a_proxy_sees_their_end(system: System) -> None:
    await system.start_worker(1)
    last = SMUGGLED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    clear = {
        "a chunk extension": post(b"Transfer-Encoding: chunked", body=CHUNKED.replace(b"\r\n", b";a=b\r\n", 1)),
        "capital letters": post(b"TRANSFER-ENCODING: Chunked", body=CHUNKED),
        "an absolute target": post(LENGTH, start=b"POST http://other/v1/completions HTTP/1.1"),
        "an answer that is an error": post(b"Content-Length: 2", body=b"{}"),
        "a body for a path that takes none": post(LENGTH, start=b"POST /absent HTTP/1.1"),
    }
    found = {name: await statuses(system.http, sent + last) for name, sent in clear.items()}
    # Each is answered once, and then the request behind it; or it is refused, and the connection with it.
    assert {name: codes for name, codes in found.items() if codes[1:] not in ([200], []) or not codes} == {}
    assert found["a chunk extension"] == found["capital letters"] == [200, 200]
    assert found["an answer that is an error"] == [400, 200]


async def test_the_port_of_metrics_and_probes_refuses_ambiguous_requests_too() -> None:
    """The only HTTP port of Scheduler, Indexer, relay, sidecar and mock engines."""
    hidden = SMUGGLED.replace(b"/v1/models", b"/metrics")
    settings = ServiceSettings(http_bind="127.0.0.1:0", http_header_seconds=1)
    async with serving_ops(settings, new_registry(), HealthBoard(), None) as address:
        found = {name: await statuses(address, sent + hidden) for name, sent in AMBIGUOUS.items()}
        # A path that is not there is answered before the body is read; nothing behind it is, until time is over.
        assert {name: codes for name, codes in found.items() if codes not in ([], [400], [404], [404, 408])} == {}
        assert await statuses(address, hidden.replace(b"Host: x", b"Host: x\r\nConnection: close")) == [200]
