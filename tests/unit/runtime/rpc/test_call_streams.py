"""A unary call behaves alike over an ordinary RPC and on a call stream."""

from __future__ import annotations

import asyncio

import pytest
from kvrouter.net.calls import CallStreamCounts
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.telemetry.connection_metrics import CallStreamMetrics
from kvrouter.v1 import errors
from kvrouter.v1.worker_pb2 import AbortRequest
from prometheus_client import CollectorRegistry, generate_latest

from .rpc_harness import TRANSPORTS, WORKER, Worker, called, soon, until_idle
from .test_errors import TYPED_ERRORS


@TRANSPORTS
async def test_a_call_is_answered(transport: str) -> None:
    async with called(WORKER, Worker(), transport) as (_, stub):
        answer = await stub.abort(AbortRequest(request_ids=["a", "b"]), deadline=soon())
        assert answer.aborted == 2


@TRANSPORTS
@pytest.mark.parametrize("error", TYPED_ERRORS, ids=lambda error: type(error).__name__)
async def test_a_typed_error_arrives_as_it_was_raised(error: errors.KvRouterError, transport: str) -> None:
    worker = Worker()
    worker.failure = error
    async with called(WORKER, worker, transport) as (_, stub):
        with pytest.raises(type(error)) as caught:
            await stub.abort(AbortRequest(), deadline=soon())
    assert (caught.value.code, caught.value.info, str(caught.value)) == (error.code, error.info, str(error))


@TRANSPORTS
async def test_a_defect_becomes_internal(transport: str) -> None:
    worker = Worker()
    worker.failure = ZeroDivisionError()
    async with called(WORKER, worker, transport) as (_, stub):
        with pytest.raises(errors.Internal):
            await stub.abort(AbortRequest(), deadline=soon())


@TRANSPORTS
async def test_the_deadline_is_passed_on_and_ends_the_call(transport: str) -> None:
    worker = Worker()
    async with called(WORKER, worker, transport) as (server, stub):
        with pytest.raises(errors.DeadlineExceeded):
            await stub.abort(AbortRequest(), deadline=Deadline.after(0.3))
        (deadline,) = worker.deadlines
        assert deadline.at is not None
        await worker.closed.wait()
        await until_idle(server)


@TRANSPORTS
async def test_a_cancelled_call_is_cancelled_at_the_server(transport: str) -> None:
    worker = Worker()
    async with called(WORKER, worker, transport) as (server, stub):
        calling = asyncio.create_task(stub.abort(AbortRequest(), deadline=soon()))
        await worker.entered.wait()
        calling.cancel()
        await worker.closed.wait()
        await until_idle(server)


@TRANSPORTS
async def test_draining_finishes_running_calls_and_refuses_others(transport: str) -> None:
    worker = Worker()
    async with called(WORKER, worker, transport) as (server, stub):
        running = asyncio.create_task(stub.abort(AbortRequest(), deadline=soon()))
        await worker.entered.wait()
        draining = asyncio.create_task(server.drain(10))
        async with asyncio.timeout(10):
            while True:
                try:
                    await stub.abort(AbortRequest(request_ids=["a"]), deadline=soon())
                except (errors.Draining, errors.DependencyAway):
                    break
        assert not draining.done()
        worker.go_on.set()
        await running
        await draining


@TRANSPORTS
async def test_methods_that_the_object_lacks_are_refused(transport: str) -> None:
    async with called(WORKER, Worker(), transport) as (_, stub):
        with pytest.raises((errors.Unimplemented, errors.DependencyAway)):
            await stub.get_load(AbortRequest(), deadline=soon())


async def test_metrics_show_streams_by_side_and_service() -> None:
    registry = CollectorRegistry()
    metrics = CallStreamMetrics(registry)
    counts: CallStreamCounts = metrics.client("indexer")
    counts.calls = 3
    counts.ended["garbage"] += 1
    assert metrics.client("indexer") is counts
    metrics.server()
    text = generate_latest(registry).decode()
    assert 'kvrouter_call_stream_calls_total{service="indexer",side="client"} 3.0' in text
    assert 'kvrouter_call_stream_ended_total{reason="garbage",service="indexer",side="client"} 1.0' in text
    assert 'kvrouter_call_stream_open{service="this",side="server"} 0.0' in text
