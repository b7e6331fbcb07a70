"""The clients of `examples/clients`, each built from the contract and run against a system that loses its Frontend."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from kvrouter.devtools.system.stack import Stack, StackOptions, running_stack
from kvrouter.runtime.rpc import open_channel
from kvrouter.v1.scheduler_pb2 import GetStatusRequest
from kvrouter.v1.scheduler_pb2_grpc import SchedulerServiceStub

CLIENTS = Path(__file__).parents[3] / "examples" / "clients"
TOOLS = {"python": ("python3",), "go": ("go",), "node": ("node", "npm"), "java": ("java", "javac", "mvn")}
MODEL = "mock-model"
NO_REGISTRY = re.compile(
    r"No matching distribution|Temporary failure in name resolution|Connection refused|connection refused"
    r"|no such host|ENOTFOUND|ECONNREFUSED|EAI_AGAIN|UnknownHostException|Unknown host|Could not transfer artifact"
    r"|i/o timeout|ETIMEDOUT|Network is unreachable"
)
TOO_OLD = re.compile(
    r"requires go >=|toolchain not available|EBADENGINE|release version \d+ not supported|No compiler is provided"
)
BUILD_SECONDS = 600
STEP_SECONDS = 90

STEPS = (
    r"stream: worker \d+, 16 tokens",
    r"text: [1-9]\d* characters, 16 tokens",
    r"cancel: after 3 pieces, CANCELLED",
    r"book: worker (?P<worker>\d+) at 127\.0\.0\.1:\d+",
    r"prefill complete: known true",
    r"all busy: RESOURCE_EXHAUSTED, ALL_BUSY, retry in [1-9]\d* ms, known values: none",
    r"free: known true",
    r"retry: worker (?P<retried>\d+), 16 tokens",
    rf"unknown model: NOT_FOUND, UNKNOWN_MODEL, no retry, known values: {MODEL}",
    r"reconnect: restart the Frontend now",
)


async def build(language: str) -> None:
    """Builds a client. Skips the test if a tool is missing or the packages cannot be downloaded."""
    for tool in ("make", *TOOLS[language]):
        if shutil.which(tool) is None:
            pytest.skip(f"{language} client: {tool} is not installed")
    process = await asyncio.create_subprocess_exec(
        *("make", "-C", str(CLIENTS / language)), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(BUILD_SECONDS):
        output, _ = await process.communicate()
    text = output.decode()
    if process.returncode and NO_REGISTRY.search(text):
        pytest.skip(f"{language} client: needs a package registry")
    if process.returncode and (found := TOO_OLD.search(text)):
        pytest.skip(f"{language} client: needs a newer toolchain ({found[0]})")
    assert process.returncode == 0, text[-4000:]


@asynccontextmanager
async def running_client(language: str, target: str, errors: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs a client. Its standard error, which may have warnings of the runtime, goes to a file."""
    log = await asyncio.to_thread(errors.open, "wb")
    process = await asyncio.create_subprocess_exec(
        *("make", "-s", "-C", str(CLIENTS / language), "run", f"ARGS={target} {MODEL}"),
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
        start_new_session=True,
    )
    log.close()
    try:
        yield process
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def until_bookings(stack: Stack, count: int) -> None:
    """Returns when the Scheduler has that many bookings."""
    async with asyncio.timeout(STEP_SECONDS), open_channel(stack.scheduler) as channel:
        scheduler = SchedulerServiceStub(channel)
        while (await scheduler.GetStatus(GetStatusRequest())).bookings != count:
            await asyncio.sleep(0.05)


async def next_line(client: asyncio.subprocess.Process) -> str:
    assert client.stdout is not None
    async with asyncio.timeout(STEP_SECONDS):
        return (await client.stdout.readline()).decode().rstrip("\n")


@pytest.mark.timeout(BUILD_SECONDS + 300)
@pytest.mark.parametrize("language", TOOLS)
async def test_a_client_generated_from_the_contract_does_every_step(language: str, tmp_path: Path) -> None:
    await build(language)
    options = StackOptions(tmp_path, tmp_path, workers=2, model=MODEL, restarts=True, has_text=True)
    errors = tmp_path / "client.log"
    async with running_stack(options) as stack, running_client(language, stack.frontend, errors) as client:
        seen: dict[str, str] = {}
        for step in STEPS:
            line = await next_line(client)
            found = re.fullmatch(step, line)
            assert found, f"expected a line like {step!r}, received {line!r}\n{errors.read_text(encoding='utf-8')}"
            seen |= found.groupdict()
        assert seen["retried"] == seen["worker"]
        # The cancelled request and the manual booking are gone; the stream of the last step is left.
        await until_bookings(stack, 1)

        os.kill(stack.processes["frontend"].pid, signal.SIGKILL)
        assert re.fullmatch(r"reconnected: after UNAVAILABLE, worker \d+, 16 tokens", await next_line(client))
        assert await client.wait() == 0
        await until_bookings(stack, 0)
