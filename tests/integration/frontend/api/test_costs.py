"""What a request may cost, whoever sends it: memory for each byte of its body, and time in which nobody else is served.

Memory is the greatest resident size of a real process above that at rest. Stalls of the event loop are counted in runs
of a fixed task, calibrated in the same process.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from kvrouter.devtools.system.ports import free_port
from kvrouter.v1.common_pb2 import RoutingConstraints, RoutingRequest, TokenIds
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest, FrontendServiceSelectWorkerRequest
from kvrouter.v1.worker_pb2 import StopConditions

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not os.access("/proc/self/clear_refs", os.W_OK), reason="peaks of memory are read from Linux's /proc"
    ),
]

MODEL = "mock-model"
SIZE = 12 << 20
"""Bytes of a hostile body: far above what else changes in a process."""
ACCEPTED_BYTES, REFUSED_BYTES = 12, 4
"""Most memory for each byte of a body that is accepted, or refused."""
STALL_UNITS = 400
"""Longest stall of the event loop, in runs of the reference task: some 150 ms on a machine of 2025."""
OPTIONS: Any = [("grpc.max_send_message_length", -1)]


@dataclass
class Process:
    """A measured service."""

    measure_port: int
    address: str
    http: str = ""
    at_rest: float = field(default=0.0)

    async def measured(self) -> dict[str, float]:
        """What was measured since it was last asked."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.measure_port)
        taken: dict[str, float] = json.loads(await reader.readline())
        writer.close()
        return taken

    async def costs(self, size: int) -> tuple[float, float]:
        """Memory for each byte of bodies of ``size`` bytes in all, and the longest stall, since last asked."""
        taken = await self.measured()
        return (taken["peak"] - self.at_rest) / size, taken["stall_units"]

    async def rest(self) -> None:
        """Forgets what came before; the first time, that is the state at rest."""
        taken = await self.measured()
        self.at_rest = self.at_rest or taken["resident"]


def start(module: str, address: str, *options: str) -> tuple[subprocess.Popen[bytes], int]:
    port = free_port()
    launcher = [str(Path(__file__).with_name("measured_service.py")), str(port), module]
    # Freed blocks go back to the system at once, so that one shape's memory does not hide the next one's.
    environment = dict(os.environ) | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, *launcher, "--bind", address, "--http-bind", "", "--log-level", "warning", *options]
    return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL), port


@pytest.fixture(scope="module")
def frontend() -> Iterator[Process]:
    with running_frontend() as process:
        yield process


@pytest.fixture
def fresh_frontend() -> Iterator[Process]:
    """A Frontend without earlier requests: gaps that they left in the heap would count as the cost of the next one."""
    with running_frontend() as process:
        yield process


@contextmanager
def running_frontend() -> Iterator[Process]:
    worker = f"127.0.0.1:{free_port()}"
    mocker = ["--no-registration", "--bind", worker, "--http-bind", "", "--num-blocks", "200000", "--speed", "1000000"]
    engine = subprocess.Popen([sys.executable, "-m", "kvrouter.mocker", *mocker], stderr=subprocess.DEVNULL)
    try:
        with routing_to("--static-workers", worker, "--static-model", MODEL) as process:
            until_served(process.http)
            yield process
    finally:
        engine.kill()
        engine.wait()


@contextmanager
def routing_to(*listed: str, options: Sequence[str] = ()) -> Iterator[Process]:
    """A Scheduler and a measured Frontend with the options of both that list workers, and options of the Frontend."""
    scheduler, address = (f"127.0.0.1:{free_port()}" for _ in range(2))
    http = free_port()
    routing = ["--bind", scheduler, "--http-bind", "", "--router-mode", "round-robin", *listed]
    command = [sys.executable, "-m", "kvrouter.scheduler", *routing]
    running = [subprocess.Popen(command, stderr=subprocess.DEVNULL)]
    try:
        gateway = [*listed, "--static-schedulers", scheduler, "--port", str(http), *options]
        process, measure_port = start("kvrouter.frontend.__main__", address, *gateway)
        running.append(process)
        yield Process(measure_port, address, f"http://127.0.0.1:{http}")
    finally:
        for each in running:
            each.kill()
            each.wait()


def until_served(http: str, *, text_status: int = 400) -> None:
    """Returns when a request has been served, and one with a text answered: refused unless there is a tokenizer."""
    for prompt, expected in ((list(range(100)), 200), ("text", text_status)):
        body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1}).encode()
        for _ in range(600):
            if (found := status_of(http, body)) == expected:
                break
            time.sleep(0.1)
        else:
            pytest.fail(f"the gateway answers {found} and not {expected}")


def status_of(http: str, body: bytes) -> int:
    """Returns the status of a completion, or 0 without a response."""
    try:
        with urllib.request.urlopen(f"{http}/v1/completions", body, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def filled(head: bytes, piece: bytes, tail: bytes, size: int = SIZE) -> bytes:
    return head + piece * ((size - len(head) - len(tail)) // len(piece)) + tail


START = b'{"model": "mock-model", "prompt": '
HOSTILE_BODIES = {
    "lists": filled(START + b"[", b"[],", b"[]]}"),
    "floats": filled(START + b"[", b"1.5,", b"1]}"),
    "texts": filled(START + b"[", b'"a",', b'"a"]}'),
    "too many tokens": filled(START + b"[", b"1,", b"1]}"),
    "a text at the end": filled(START + b"[", b"123456,", b'"a"]}', 5 << 20),
    "deep lists": filled(START, b"[", b""),
    "objects": filled(START + b"[", b"{},", b"{}]}"),
    "one text": filled(START + '"\U0001f600'.encode(), b"a", b'"}'),
    "one number": filled(START + b"[", b"9", b"]}"),
    "an unknown field": filled(START + '[1], "\U0001f600'.encode(), b"a", b'": 1}'),
    "a long field": filled(START + '[1], "cache_salt": "\U0001f600'.encode(), b"a", b'"}'),
    "stop tokens": filled(START + b'[1], "stop_token_ids": [', b"1,", b"1]}"),
    "one field often": filled(b'{"model": "mock-model", ', b'"prompt": [1], ', b'"prompt": [1]}'),
    "unknown fields": filled(b'{"model": "mock-model", ', b'"a": 1, ', b'"prompt": [1]}'),
    "no json": filled(b"", b"\xff", b""),
}


async def post(http: str, body: bytes, path: str = "/v1/completions") -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.post(f"{http}{path}", data=body) as response:
        return response.status, await response.text()


async def costs_of(frontend: Process, body: bytes, path: str = "/v1/completions") -> tuple[int, str, float, float]:
    """Returns status and text of the response, memory for each byte, and the longest stall.

    The stall of a refused body is measured up to three times, and the shortest counts: one that the service causes
    occurs each time, one that a busy machine causes does not. A refused body leaves nothing in caches.
    """
    await frontend.rest()
    status, said = await post(frontend.http, body, path)
    memory, stall = await frontend.costs(len(body))
    for _ in range(2):
        if stall > STALL_UNITS and status != 200:
            await post(frontend.http, body, path)
            stall = min(stall, (await frontend.costs(len(body)))[1])
    return status, said, memory, stall


@pytest.mark.parametrize("shape", HOSTILE_BODIES)
async def test_a_hostile_http_body_costs_little(frontend: Process, shape: str) -> None:
    status, said, memory, stall = await costs_of(frontend, HOSTILE_BODIES[shape])
    assert status in (400, 413), said
    assert memory <= REFUSED_BYTES
    assert stall <= STALL_UNITS


def packed(count: int) -> bytes:
    return FrontendServiceGenerateRequest(
        model=MODEL, token_ids=TokenIds(ids=[1] * count), stop_conditions=StopConditions(max_tokens=1)
    ).SerializeToString()


HOSTILE_MESSAGES: dict[str, tuple[str, bytes]] = {
    "too many tokens": ("Generate", packed(SIZE // 4)),
    "multimodal hashes": ("Generate", filled(b"", b"\x5a\x00", b"")),
    "unpacked tokens": ("Generate", filled(b"", b"\x1d\x01\x00\x00\x00", b"")),
    "tokens as varints": ("Generate", filled(b"", b"\x18\x01", b"")),
    "required labels": ("Generate", filled(b"", b"\x3a\x04\x2a\x02\x0a\x00", b"")),
    "unknown fields": ("Generate", filled(b"", b"\xf8\x07\x01", b"")),
    "excluded workers": (
        "SelectWorker",
        FrontendServiceSelectWorkerRequest(
            request=RoutingRequest(model=MODEL, constraints=RoutingConstraints(excluded_worker_ids=[1] * SIZE))
        ).SerializeToString(),
    ),
    "requests": ("GetPotentialLoads", filled(b"", b"\x0a\x00", b"")),
    "no message": ("SelectWorker", filled(b"", b"\xff", b"")),
}


async def refused(channel: grpc.aio.Channel, method: str, encoded: bytes) -> None:
    kind = channel.unary_stream if method == "Generate" else channel.unary_unary
    call: Any = kind(f"/kvrouter.v1.FrontendService/{method}")(encoded)
    assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("shape", HOSTILE_MESSAGES)
async def test_a_hostile_message_costs_little(frontend: Process, shape: str) -> None:
    method, encoded = HOSTILE_MESSAGES[shape]
    async with grpc.aio.insecure_channel(frontend.address, options=OPTIONS) as channel:
        await frontend.rest()
        await refused(channel, method, encoded)
        memory, stall = await frontend.costs(len(encoded))
    assert memory <= REFUSED_BYTES
    assert stall <= STALL_UNITS


async def test_refused_messages_do_not_gather_in_a_frontend(frontend: Process) -> None:
    encoded = packed(SIZE // 4)
    async with grpc.aio.insecure_channel(frontend.address, options=OPTIONS) as channel:
        await frontend.rest()
        for _ in range(12):
            await refused(channel, "Generate", encoded)
        memory, _ = await frontend.costs(len(encoded))
    assert memory <= REFUSED_BYTES


async def test_many_refused_messages_at_once_cost_little(frontend: Process) -> None:
    method, encoded = HOSTILE_MESSAGES["too many tokens"]
    async with grpc.aio.insecure_channel(frontend.address, options=OPTIONS) as channel:
        await frontend.rest()
        async with asyncio.TaskGroup() as group:
            for _ in range(6):
                group.create_task(refused(channel, method, encoded))
        memory, _ = await frontend.costs(6 * len(encoded))
    assert memory <= REFUSED_BYTES


def prompt(least: int, greatest: int, count: int = 1 << 20) -> list[int]:
    draw = Random(1)
    return [draw.randrange(least, greatest) for _ in range(count)]


PROMPTS = {"of a large vocabulary": (0, 128_000), "of few tokens": (0, 10)}


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("kind", PROMPTS)
async def test_a_long_prompt_over_http_costs_little(fresh_frontend: Process, kind: str, stream: bool) -> None:
    fields = {"model": MODEL, "prompt": prompt(*PROMPTS[kind]), "max_tokens": 2, "stream": stream}
    body = json.dumps(fields, separators=(",", ":")).encode()
    await fresh_frontend.rest()
    status, said = await post(fresh_frontend.http, body)
    assert status == 200, said
    memory, stall = await fresh_frontend.costs(len(body))
    assert memory <= ACCEPTED_BYTES
    assert stall <= STALL_UNITS


@pytest.mark.full
@pytest.mark.parametrize("kind", PROMPTS)
async def test_a_long_prompt_over_grpc_costs_little(fresh_frontend: Process, kind: str) -> None:
    encoded = FrontendServiceGenerateRequest(
        model=MODEL, token_ids=TokenIds(ids=prompt(*PROMPTS[kind])), stop_conditions=StopConditions(max_tokens=2)
    ).SerializeToString()
    async with grpc.aio.insecure_channel(fresh_frontend.address, options=OPTIONS) as channel:
        await fresh_frontend.rest()
        generate: Any = channel.unary_stream("/kvrouter.v1.FrontendService/Generate")
        call = generate(encoded, timeout=120)
        async for _ in call:
            pass
        assert await call.code() == grpc.StatusCode.OK
        memory, stall = await fresh_frontend.costs(len(encoded))
    assert memory <= ACCEPTED_BYTES
    assert stall <= STALL_UNITS
