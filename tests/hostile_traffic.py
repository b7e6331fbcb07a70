"""Traffic of peers without a credential, of every kind, against HTTP and gRPC ports. As a program, an attacker.

``python -m tests.hostile_traffic`` reads a JSON object with the fields of ``Attack`` from its first argument, attacks
for that time, and prints how many connections it opened and bytes it sent, by kind.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from kvrouter.net.http2 import frames
from kvrouter.net.http2.frames import Kind, Setting, frame, settings

from .hostile_peer import OPEN_STREAM, HostilePeer, hostile_peer, message_head, request_headers

BEST_WORKER = "/kvrouter.v1.FrontendService/SelectWorker"
PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
WATCH = "/grpc.health.v1.Health/Watch"
CHECK = "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
_WAVE_SECONDS = 15.0
"""Time after which all connections turn to other kinds of traffic: all of them, some, or a single one."""
CLIENT_HELLO = bytes.fromhex("160301020001000001fc0303") + bytes(range(32)) + b"\x20" + bytes(64)
"""The beginning of a TLS handshake that never goes on."""


@dataclass
class Attack:
    """What an attacker does."""

    http: list[str] = field(default_factory=list)
    """HTTP ports, host:port."""
    grpc: list[str] = field(default_factory=list)
    """gRPC ports, host:port."""
    seconds: float = 10.0
    connections: int = 1000
    """Connections at once, of all kinds and ports."""
    bytes_per_second: float = 1e6
    kinds: list[str] = field(default_factory=list)
    """Names of kinds of traffic; none for all."""

    def arguments(self) -> list[str]:
        """Returns the command that attacks, nicely."""
        return ["nice", "-n", "19", sys.executable, "-m", "tests.hostile_traffic", json.dumps(asdict(self))]


class Wire:
    """What the connections of an attacker share: its rate."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0
        self.sent = 0

    async def pay(self, size: int) -> None:
        """Waits until so many bytes may be sent. Headers of packets count."""
        size += 60
        self.sent += size
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now) + size / self._rate
        if self._free_at > now + 0.005:
            await asyncio.sleep(self._free_at - now)


# --- HTTP ---


class Http:
    """One connection that speaks HTTP/1.1 by hand."""

    def __init__(self, address: str, wire: Wire, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        self.address = address
        self.wire = wire
        self.reader, self.writer = streams

    async def send(self, data: bytes) -> None:
        await self.wire.pay(len(data))
        self.writer.write(data)
        await self.writer.drain()
        if self.writer.is_closing() or self.reader.at_eof():
            raise ConnectionError

    async def answer(self) -> None:
        """Reads one response."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0")
        await self.reader.readexactly(int(length.partition(b":")[2]))

    async def repeat(self, data: Callable[[], bytes]) -> None:
        while True:
            await self.send(data())
            await self.answer()


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


def post(size: int, *headers: str, path: str = "/v1/completions") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {size}", *headers, "", ""]
    return "\r\n".join(lines).encode()


async def silence(connection: Http) -> None:
    await connection.reader.read()


async def idle_after_a_request(connection: Http) -> None:
    await connection.send(get("/health"))
    await connection.reader.read()


async def garbage(connection: Http) -> None:
    while True:
        await connection.send(random.randbytes(2_000))
        await asyncio.sleep(0.1)


async def half_a_handshake(connection: Http) -> None:
    await connection.send(CLIENT_HELLO)
    await connection.reader.read()


async def slow_head(connection: Http) -> None:
    await connection.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ")
    while True:
        await connection.send(b"x")
        await asyncio.sleep(0.5)


async def slow_body(connection: Http) -> None:
    await connection.send(post(60 << 20))
    while True:
        await connection.send(b"x" * 100)
        await asyncio.sleep(0.5)


async def long_heads(connection: Http) -> None:
    await connection.send(get("/v1/models").removesuffix(b"\r\n"))
    for number in range(120):
        await connection.send(f"X-{number}: {'v' * 8_000}\r\n".encode())


async def without_a_key(connection: Http) -> None:
    await connection.repeat(lambda: get("/v1/models"))


async def with_wrong_keys(connection: Http) -> None:
    await connection.repeat(lambda: post(2, f"Authorization: Bearer {random.randbytes(20).hex()}") + b"{}")


async def bodies_that_nobody_reads(connection: Http) -> None:
    await connection.repeat(lambda: post(100_000) + bytes(100_000))


async def pipelined(connection: Http) -> None:
    while True:
        await connection.send(100 * get("/v1/models"))


async def unread_metrics(connection: Http) -> None:
    """Asks for long answers and reads none."""
    connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
    while True:
        await connection.send(get("/metrics"))


async def probes(connection: Http) -> None:
    await connection.repeat(lambda: get(random.choice(["/health", "/ready", "/metrics", "/", "/nothing"])))


async def churn(connection: Http) -> None:
    await connection.send(get("/v1/models"))
    await connection.answer()


async def empty_connections(connection: Http) -> None:
    await connection.wire.pay(0)


HTTP: dict[str, Callable[[Http], Awaitable[None]]] = {
    each.__name__: each
    for each in (
        *(silence, idle_after_a_request, garbage, half_a_handshake, slow_head, slow_body, long_heads, without_a_key),
        *(with_wrong_keys, bodies_that_nobody_reads, pipelined, unread_metrics, probes, churn, empty_connections),
    )
}


# --- gRPC ---


def part_of(path: str) -> Callable[[HostilePeer], None]:
    """Returns what opens a call and sends the beginning of a message of 60 MiB."""
    return lambda peer: peer.data(peer.open(path), message_head(60 << 20) + bytes(16_000))


def message_of(path: str, message: bytes = b"") -> Callable[[HostilePeer], None]:
    """Returns what makes a call with one message."""

    def call(peer: HostilePeer) -> None:
        stream = peer.open(path)
        peer.send(frame(Kind.DATA, message_head(len(message)) + message, flags=frames.END_STREAM, stream=stream))

    return call


def watch(peer: HostilePeer) -> None:
    peer.data(peer.open(WATCH), message_head(0))


def open_and_reset(peer: HostilePeer) -> None:
    peer.send(frame(Kind.RST_STREAM, b"\0\0\0\x08", stream=peer.open(BEST_WORKER)))


def endless_headers(peer: HostilePeer) -> None:
    metadata = [(f"k{number}", "v" * 100) for number in range(60)]
    peer.send(frame(Kind.HEADERS, request_headers(BEST_WORKER, metadata), stream=1))


def continuations(peer: HostilePeer) -> None:
    """Sends a block of headers that never ends."""
    if peer.sent < 100:
        peer.send(frame(Kind.HEADERS, request_headers(BEST_WORKER), stream=1))
    metadata = [(f"k{number}", "v" * 100) for number in range(60)]
    peer.send(frame(Kind.CONTINUATION, request_headers(BEST_WORKER, metadata), stream=1))


def random_frames(peer: HostilePeer) -> None:
    for _ in range(10):
        kind, size = random.randrange(12), random.randrange(60)
        head = size.to_bytes(3, "big") + bytes([kind, random.randrange(256)])
        peer.send(head + random.randrange(9).to_bytes(4, "big") + random.randbytes(size))


FLOODS: dict[str, Callable[[HostilePeer], object]] = {
    "idle streams": lambda peer: peer.open(OPEN_STREAM),
    "idle streams of the picker": lambda peer: peer.open(PROCESS),
    "messages for the picker": message_of(PROCESS, bytes.fromhex("ffffffff")),
    "parts of messages on streams": part_of(OPEN_STREAM),
    "parts of requests": part_of(BEST_WORKER),
    "parts of requests for everybody": part_of(WATCH),
    "parts of messages for the picker": part_of(PROCESS),
    "refused calls": lambda peer: peer.open(BEST_WORKER, ends=True),
    "unknown methods": lambda peer: peer.open("/no.such/Method", ends=True),
    "watches": watch,
    "probes": message_of(CHECK),
    "reflection": message_of(REFLECTION, b"\x3a\x01*"),
    "resets": open_and_reset,
    "endless headers": endless_headers,
    "continuations": continuations,
    "pings": lambda peer: peer.send(10 * frame(Kind.PING, b"12345678")),
    "settings": lambda peer: peer.send(10 * settings({Setting.INITIAL_WINDOW_SIZE: 70_000})),
    "window updates": lambda peer: peer.send(10 * frame(Kind.WINDOW_UPDATE, b"\0\0\0\x01")),
    "random frames": random_frames,
    "silence": lambda _peer: None,
}
"""What one connection sends at each of its turns."""
_PAUSES = {"silence": 1.0, "idle streams": 0.1, "watches": 0.1}
"""Time between two turns of a connection, seconds; most send as fast as they may."""


async def raw_garbage(address: str, wire: Wire) -> None:
    host, _, port = address.rpartition(":")
    streams = await asyncio.open_connection(host, int(port))
    connection = Http(address, wire, streams)
    try:
        await random.choice([garbage, half_a_handshake, silence])(connection)
    finally:
        streams[1].transport.abort()


async def flood(address: str, attack: Callable[[HostilePeer], object], pause: float, wire: Wire) -> None:
    """Attacks over one connection until the server closes it. Some connections read nothing."""
    await wire.pay(100)
    async with hostile_peer(address, reads=random.random() < 0.8) as peer:
        while not (peer.writer.is_closing() or peer.reader.at_eof()):
            before = peer.sent
            attack(peer)
            await wire.pay(peer.sent - before)
            await peer.writer.drain()
            if pause:
                await asyncio.sleep(pause)


# --- the attacker ---


async def speak_http(address: str, behaviour: Callable[[Http], Awaitable[None]], wire: Wire) -> None:
    await wire.pay(100)
    host, _, port = address.rpartition(":")
    streams = await asyncio.open_connection(host, int(port), limit=1 << 22)
    try:
        await behaviour(Http(address, wire, streams))
    finally:
        streams[1].transport.abort()


async def attack(what: Attack) -> dict[str, Any]:
    """Attacks, and returns counts."""
    wire = Wire(what.bytes_per_second)
    runs: list[tuple[str, Callable[[], Awaitable[None]]]] = []
    for address in what.http:
        for name, behaviour in HTTP.items():
            runs.append((f"http {name}", lambda a=address, b=behaviour: speak_http(a, b, wire)))
    for address in what.grpc:
        runs.append(("grpc garbage", lambda a=address: raw_garbage(a, wire)))
        for name, flooding in FLOODS.items():
            pause = _PAUSES.get(name, 0.0)
            runs.append((f"grpc {name}", lambda a=address, f=flooding, p=pause: flood(a, f, p, wire)))
    if what.kinds:
        runs = [run for run in runs if run[0] in what.kinds]
    opened: Counter[str] = Counter()
    waves = runs

    async def make_waves() -> None:
        nonlocal waves
        while True:
            await asyncio.sleep(_WAVE_SECONDS)
            waves = random.sample(runs, min(len(runs), random.choice([1, 4, len(runs)])))

    async def keep_at_it(number: int) -> None:
        while True:
            name, run = waves[number % len(waves)]
            opened[name] += 1
            try:
                async with asyncio.timeout(random.uniform(1, _WAVE_SECONDS)):
                    await run()
            except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
                pass
            await asyncio.sleep(0.001)

    tasks = [asyncio.create_task(keep_at_it(number)) for number in range(what.connections)]
    tasks.append(asyncio.create_task(make_waves()))
    done, _ = await asyncio.wait(tasks, timeout=what.seconds)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in done:
        task.result()
    return {"sent_bytes": wire.sent, "connections": opened.total(), "opened": dict(opened)}


if __name__ == "__main__":
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    with suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    sys.stdout.write(json.dumps(asyncio.run(attack(Attack(**json.loads(sys.argv[1]))))))
