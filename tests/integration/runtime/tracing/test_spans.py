"""Spans when tracing is off, sampled, or its collector is away."""

from __future__ import annotations

import asyncio
import re

import pytest
from kvrouter.net import trace_context
from kvrouter.runtime.tracing import Kind, current_span, request_span, span
from kvrouter.runtime.tracing.configuration import TracingMetrics
from kvrouter.runtime.tracing.recording import recording
from kvrouter.runtime.tracing.spans import OFF
from kvrouter.v1.errors import NoWorkers
from prometheus_client import CollectorRegistry

from tests.integration.runtime.tracing.collector import collecting

RESOURCE = {"service.name": "kvrouter-test", "service.instance.id": "i"}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"


def test_without_a_recorder_every_span_is_the_same_object_that_does_nothing() -> None:
    with trace_context.entered(PARENT + "01"):
        assert request_span("a") is span("b", Kind.CLIENT) is current_span() is OFF
        with span("c") as nothing:
            assert not nothing.recording
            assert trace_context.current() == PARENT + "01", "the context passes through"
    assert trace_context.current() == ""


@pytest.mark.parametrize(
    "sent",
    [
        "",
        "00-1-2-01",
        PARENT + "1",
        PARENT + "01 ",
        PARENT + "01-more",
        PARENT.upper() + "01",
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01",
        "ff" + PARENT[2:] + "01",
        "\n" * 55,
    ],
)
def test_what_is_no_trace_context_is_ignored(sent: str) -> None:
    assert trace_context.checked(sent) == ""
    assert trace_context.checked(PARENT + "01") == PARENT + "01"


async def test_a_collector_that_refuses_costs_spans_only() -> None:
    registry = CollectorRegistry()
    async with collecting() as collector, recording(collector.url, 1.0, RESOURCE, TracingMetrics(registry)):
        collector.status = 400
        with request_span("request") as request, span("step", Kind.CLIENT) as step:
            assert request.recording
            assert step.recording
            step.set({"text": "x" * 10_000, "numbers": [1.5, 2.5]})
    assert registry.get_sample_value("kvrouter_trace_spans_total") == 2
    assert registry.get_sample_value("kvrouter_trace_spans_exported_total", {"outcome": "failed"}) == 2
    assert request_span("later") is OFF


async def test_the_client_decides_what_is_recorded_and_otherwise_the_ratio() -> None:
    registry = CollectorRegistry()
    async with collecting() as collector, recording(collector.url, 0.0, RESOURCE, TracingMetrics(registry)):
        with request_span("of the ratio") as unsampled:
            assert not unsampled.recording
            assert trace_context.current().endswith("-00"), "services behind this one do not record it either"
        with span("outside of any request") as outside:
            assert outside is OFF
        with trace_context.entered(PARENT + "01"), request_span("of the client") as sampled:
            assert sampled.recording
            assert re.fullmatch(
                r"00-0af7651916cd43dd8448eb211c80319c-(?!b7ad6b7169203331)\w{16}-01", trace_context.current()
            )
    assert registry.get_sample_value("kvrouter_trace_spans_total") == 1


async def test_an_error_ends_its_spans_and_tasks_of_a_request_belong_to_it() -> None:
    registry = CollectorRegistry()
    async with collecting() as collector, recording(collector.url, 1.0, RESOURCE, TracingMetrics(registry)):

        async def context() -> str:
            return trace_context.current()

        async def request() -> None:
            with request_span("request"):
                assert await asyncio.create_task(context()) == trace_context.current() != ""
                assert await asyncio.create_task(context(), context=trace_context.background()) == ""
                raise NoWorkers("none")

        with pytest.raises(NoWorkers):
            await request()
        assert trace_context.current() == ""
        assert current_span() is OFF
    assert registry.get_sample_value("kvrouter_trace_spans_total") == 1
