"""A request whose stages fail and move is one trace, in which every stage and every failed attempt is a span."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
from kvrouter.net import trace_context
from kvrouter.runtime.tracing.configuration import TracingMetrics
from kvrouter.runtime.tracing.recording import recording
from prometheus_client import CollectorRegistry

from tests.integration.runtime.tracing.collector import Collector, Received, collecting

from ....hostile_worker import Behaviour, aborts, piece, writes
from .fleet import DECODE, PREFILL, Fleet, running_fleet

TRACE = "0af7651916cd43dd8448eb211c80319c"
GENERATE = "kvrouter.v1.WorkerService/Generate"


@pytest.fixture
async def fleet(nats_url: str, etcd_endpoint: str, namespace: str) -> AsyncIterator[Fleet]:
    async with running_fleet(nats_url, etcd_endpoint, namespace, router_mode="round-robin") as running:
        await running.start(1, DECODE)
        await running.start(2, PREFILL)
        yield running


async def spans_of_calls(fleet: Fleet, collector: Collector) -> list[Received]:
    """Serves a request in a trace of its own and returns the spans of its calls to workers, the oldest first."""
    fleet_trace = f"{int(TRACE, 16) + len(collector.spans):032x}"
    with trace_context.entered(f"00-{fleet_trace}-b7ad6b7169203331-01"):
        assert (await fleet.serve(first=1000 * len(collector.spans))).tokens
    await collector.until(lambda: any(each.name == "generate" for each in collector.of_trace(fleet_trace)))
    calls = [each for each in collector.of_trace(fleet_trace) if each.name == GENERATE]
    return sorted(calls, key=lambda each: each.span.start_time_unix_nano)


async def test_the_prefill_is_a_span_beside_that_of_its_decode_worker(fleet: Fleet) -> None:
    metrics = TracingMetrics(CollectorRegistry())
    async with collecting() as collector, recording(collector.url, 0.0, {"service.name": "frontend"}, metrics):
        prefill, decode = await spans_of_calls(fleet, collector)
    assert (prefill.attributes["kvrouter.stage"], prefill.attributes["kvrouter.rank"]) == ("prefill", "2:0")
    assert decode.attributes["kvrouter.rank"] == "1:0"
    assert prefill.span.parent_span_id == decode.span.parent_span_id


@pytest.mark.parametrize(
    ("behave", "error"),
    [(aborts(grpc.StatusCode.UNAVAILABLE), "UNAVAILABLE"), (writes(piece(1)), "unfinished")],
    ids=["retried", "continued"],
)
async def test_a_request_that_moves_to_another_worker_stays_one_trace(
    fleet: Fleet, behave: Behaviour, error: str
) -> None:
    metrics = TracingMetrics(CollectorRegistry())
    async with (
        fleet.hostile(3, DECODE, behave) as worker,
        collecting() as collector,
        recording(collector.url, 0.0, {"service.name": "frontend"}, metrics),
    ):
        calls: list[Received] = []
        while not worker.calls:
            calls = await spans_of_calls(fleet, collector)
    attempts = [each for each in calls if "kvrouter.stage" not in each.attributes]
    failed, served = attempts
    assert (failed.attributes["kvrouter.rank"], served.attributes["kvrouter.rank"]) == ("3:0", "1:0")
    assert failed.attributes["error.type"] == error
    assert failed.span.parent_span_id == served.span.parent_span_id
    assert (failed.attributes["kvrouter.attempt"], served.attributes["kvrouter.attempt"]) == (0, 1)
