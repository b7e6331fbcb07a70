"""The examples of the SDK's page, each run as a process of its own."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
from kvrouter.devtools.conformance.options import CheckOptions
from kvrouter.devtools.conformance.suite import run_checks
from kvrouter.net.nats.connection import connect_nats
from kvrouter.publisher.worker_server import SERVICE
from kvrouter.v1.names import ComponentName
from kvrouter.v1.worker_pb2 import StopConditions, WorkerServiceGenerateRequest, WorkerServiceGenerateResponse
from kvrouter.v1.worker_pb2_grpc import WorkerServiceStub

from .worker_harness import event_ids, eventually, stream_batches

EXAMPLES = Path(__file__).parents[3] / "examples"
EXAMPLE = EXAMPLES / "custom_engine.py"


@asynccontextmanager
async def example(name: str, *arguments: str, says: str) -> AsyncIterator[re.Match[str]]:
    """Runs an example, and yields the first line that matches ``says``."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLES / name), *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        while not (said := re.search(says, line := (await process.stdout.readline()).decode())):
            assert line, "the example ended"
        yield said
    finally:
        process.kill()
        await process.wait()


async def test_the_example_serves_reports_and_stops(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    component = ComponentName(namespace, "echo")
    arguments = ("--etcd", etcd_endpoint, "--nats", nats_url, "--component", str(component))
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLE), *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        endpoint = None
        while endpoint is None:
            line = (await process.stdout.readline()).decode()
            assert line, "the example ended"
            endpoint = re.search(r"serves 'echo' at (\S+)", line)
        async with grpc.aio.insecure_channel(endpoint[1]) as channel:
            generate = channel.unary_stream(
                f"/{SERVICE}/Generate",
                request_serializer=WorkerServiceGenerateRequest.SerializeToString,
                response_deserializer=WorkerServiceGenerateResponse.FromString,
            )
            request = WorkerServiceGenerateRequest(
                request_id="r", token_ids=range(40), stop_conditions=StopConditions(max_tokens=3)
            )
            cached = []
            for _ in range(2):
                outputs = [response.output async for response in generate(request)]
                assert [token for output in outputs for token in output.token_ids] == [0, 1, 2]
                cached.append(outputs[0].cached_tokens)
            assert cached == [0, 32]
        async with connect_nats(nats_url, "test") as client:

            async def reported() -> bool:
                return event_ids(await stream_batches(client, component)) == [0]

            await eventually(reported)
        checked = CheckOptions(endpoint[1], 0, component, etcd_endpoint, nats_url)
        results = {result.name: result.outcome async for result in run_checks(checked)}
        assert {name for name, outcome in results.items() if outcome != "passed"} == {"long prompt", "restart"}
        assert "failed" not in results.values()
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_the_small_engine_serves_and_reports(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    component = ComponentName(namespace, "small")
    arguments = (str(component), etcd_endpoint, nats_url)
    async with (
        example("small_engine.py", *arguments, says=r"serves 'small' at (\S+)") as said,
        grpc.aio.insecure_channel(said[1]) as channel,
        connect_nats(nats_url, "test") as client,
    ):
        generate = WorkerServiceStub(channel).Generate
        request = WorkerServiceGenerateRequest(
            request_id="r", token_ids=range(40), stop_conditions=StopConditions(max_tokens=3)
        )
        cached = []
        for _ in range(2):
            outputs = [response.output async for response in generate(request)]
            assert [token for output in outputs for token in output.token_ids] == [0, 1, 2]
            cached.append(outputs[0].cached_tokens)
        assert cached == [0, 32]

        async def reported() -> bool:
            return event_ids(await stream_batches(client, component)) == [0]

        await eventually(reported)


async def test_the_publishing_example_publishes(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    component = ComponentName(namespace, "published")
    arguments = (str(component), etcd_endpoint, nats_url)
    async with (
        example("publish_only.py", *arguments, says="publishes 1 block"),
        connect_nats(nats_url, "test") as client,
    ):
        assert event_ids(await stream_batches(client, component)) == [0, 1]
