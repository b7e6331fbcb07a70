"""What the endpoint picker accounts for: cached tokens, overload, named ranks and traces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody, HttpHeaders
from kvrouter.devtools.system.ports import free_port
from kvrouter.runtime.tracing.configuration import TracingMetrics
from kvrouter.runtime.tracing.recording import recording
from prometheus_client import CollectorRegistry

from tests.integration.runtime.tracing.collector import collecting

from ..gateway import MODEL, running_system
from .gateway_stream import GatewayStream, headers
from .picking import Gateway

STREAM = {"model": MODEL, "prompt": list(range(100)), "max_tokens": 8, "stream": True}
WHOLE = {"model": MODEL, "prompt": list(range(100)), "max_tokens": 8}
EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'
REPORTED = b'{"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 48}}}'
USAGE = b"data: " + REPORTED + b"\n\n"
DONE = b"data: [DONE]\n\n"
TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@asynccontextmanager
async def picking(nats_url: str, etcd_endpoint: str, namespace: str, **options: Any) -> AsyncIterator[Gateway]:
    address = f"127.0.0.1:{free_port()}"
    where = nats_url, etcd_endpoint, namespace
    async with running_system(*where, endpoint_picker_bind=address, **options) as system:
        gateway = Gateway(system, address)
        yield gateway
        await gateway.channel.close()


def reported(registry: CollectorRegistry) -> float:
    """Returns the cached tokens that engines have reported."""
    return registry.get_sample_value("kvrouter_frontend_cached_tokens_total", {"model": MODEL}) or 0.0


@pytest.mark.parametrize(
    ("body", "pieces", "content_type"),
    [
        (STREAM, [EVENT, USAGE[:30], USAGE[30:], DONE], "text/event-stream"),
        (WHOLE, [REPORTED[:20], REPORTED[20:]], "application/json"),
    ],
)
async def test_cached_tokens_that_an_engine_reports_are_counted(
    gateway: Gateway, body: dict[str, Any], pieces: list[bytes], content_type: str
) -> None:
    await gateway.add_engine(1)
    stream = gateway.stream()
    _, sent = await stream.routed(body)
    assert json.loads(sent) == body
    assert await stream.respond(*pieces, content_type=content_type) == b"".join(pieces)
    await stream.end()
    await gateway.until_booked(0)
    registry = gateway.system.runtime.registry
    assert reported(registry) == 48
    assert registry.get_sample_value("kvrouter_frontend_prompt_tokens_total", {"model": MODEL}) == 100
    assert registry.get_sample_value("kvrouter_frontend_predicted_cached_tokens_total", {"model": MODEL}) == 0


async def test_the_tokens_of_a_stream_take_blocks_and_its_end_frees_them(gateway: Gateway) -> None:
    await gateway.add_engine(1)

    async def blocks() -> int:
        return (await gateway.system.loads())[1].potential_decode_blocks

    idle, stream = await blocks(), gateway.stream()
    await stream.routed(STREAM)
    assert await stream.respond(EVENT) == EVENT
    booked = await blocks()
    for _ in range(40):  # Its prompt of 100 tokens leaves room for 12 in the seventh block.
        await stream.send(response_body=HttpBody(body=EVENT))
        answer = (await stream.receive()).response_body.response.body_mutation.streamed_response
        assert (answer.body, answer.end_of_stream) == (EVENT, False)
    async with asyncio.timeout(10):  # They are reported with the next call, a heartbeat at the latest.
        while await blocks() != booked + 2:
            await asyncio.sleep(0.05)
    await stream.send(response_body=HttpBody(body=USAGE, end_of_stream=True))
    answer = (await stream.receive()).response_body.response.body_mutation.streamed_response
    assert (answer.body, answer.end_of_stream) == (USAGE, True)
    await gateway.until_booked(0)
    assert await blocks() == idle
    assert reported(gateway.system.runtime.registry) == 48


async def test_a_frontend_without_room_refuses_with_429_until_a_request_ends(
    nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    async with picking(nats_url, etcd_endpoint, namespace, max_requests_in_flight=1) as gateway:
        await gateway.add_engine(1)
        first = gateway.stream()
        await first.routed(STREAM)
        status, sent, error = await gateway.stream().refused(STREAM)
        assert (status, error["type"]) == (429, "rate_limit_error")
        assert int(sent["retry-after"]) >= 1
        await gateway.until_booked(1)
        await first.respond(EVENT, DONE)
        await first.end()
        await gateway.until_booked(0)
        second = gateway.stream()
        await second.routed(STREAM)
        second.call.cancel()
        await gateway.until_booked(0)
        await gateway.stream().routed(STREAM)


async def test_the_response_says_how_much_of_the_prompt_its_worker_is_expected_to_have(gateway: Gateway) -> None:
    await gateway.add_engine(1)
    stream = gateway.stream()
    await stream.routed(STREAM)
    await stream.send(response_headers=HttpHeaders(headers=headers()))
    added = stream.set_headers(await stream.receive())
    assert (added["x-kvrouter-worker"], added["x-kvrouter-overlap-blocks"]) == ("1:0", "0")


async def test_a_rank_that_the_client_names_serves_it(gateway: Gateway) -> None:
    await gateway.add_engine(1, ranks={0: 1000, 1: 1000})
    for rank in ("1", "1", "0"):
        stream = gateway.stream()
        await stream.request(STREAM, sent={"x-data-parallel-rank": rank})
        routed = await stream.receive()
        assert stream.set_headers(routed)["x-data-parallel-rank"] == rank
    status, _, error = await gateway.stream().refused(STREAM, sent={"x-data-parallel-rank": "-1"})
    assert (status, error["param"]) == (400, "x-data-parallel-rank")
    status, _, error = await gateway.stream().refused(STREAM, sent={"x-data-parallel-rank": "7"})
    assert (status, error["param"]) == (400, "dp_rank")


async def test_engine_and_client_learn_which_rank_has_more_of_the_prompt(
    nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    body = {"model": MODEL, "prompt": list(range(64))}
    async with picking(nats_url, etcd_endpoint, namespace, scheduling={"router_mode": "kv"}) as gateway:
        await gateway.add_engine(1, ranks={0: 1000, 1: 1000}, publishes_events=False)
        for rank, source in (("0", None), ("1", "1:0; tier=device; blocks=3")):
            stream = gateway.stream()
            sent = {"x-data-parallel-rank": rank, "x-kvrouter-kv-source": "9:9"}
            await stream.request(body, sent=sent)
            routed = await stream.receive()
            assert stream.set_headers(routed).get("x-kvrouter-kv-source") == source
            removed = routed.request_headers.response.header_mutation.remove_headers
            assert ("x-kvrouter-kv-source" in removed) == (source is None), "never the client's"
            assert (await stream.receive()).request_body.response.body_mutation.streamed_response.end_of_stream
            await stream.send(response_headers=HttpHeaders(headers=headers()))
            assert stream.set_headers(await stream.receive()).get("x-kvrouter-kv-source") == source
            await stream.end()


async def test_an_engine_with_one_rank_gets_no_rank(gateway: Gateway) -> None:
    await gateway.add_engine(1)
    stream = gateway.stream()
    await stream.request(STREAM, sent={"x-data-parallel-rank": "0"})
    routed = await stream.receive()
    assert "x-data-parallel-rank" not in stream.set_headers(routed)
    assert "x-data-parallel-rank" in routed.request_headers.response.header_mutation.remove_headers


POSTED = {":method": "POST", ":path": "/v1/completions?x=1", "traceparent": f"00-{TRACE}-{CLIENT}-01"}


async def test_the_engine_continues_the_trace_of_the_choice_and_of_a_client_that_began_none(gateway: Gateway) -> None:
    await gateway.add_engine(1)
    metrics = TracingMetrics(CollectorRegistry())
    async with collecting() as collector, recording(collector.url, 1.0, {"service.name": "picker"}, metrics):
        for sent in (POSTED, {}):
            stream = gateway.stream()
            await stream.request(STREAM, sent=sent)
            _, trace, span, _ = GatewayStream.set_headers(await stream.receive())["traceparent"].split("-")
            await collector.until(lambda trace=trace: bool(collector.of_trace(trace)))
            picked = next(each for each in collector.of_trace(trace) if each.name == "pick endpoint")
            assert picked.span.span_id.hex() == span
            assert picked.attributes["kvrouter.rank"] == "1:0"
            assert picked.attributes["gen_ai.usage.input_tokens"] == 100
            assert (trace == TRACE) is bool(sent)


async def test_a_trace_context_passes_on_where_no_spans_are_recorded(gateway: Gateway) -> None:
    await gateway.add_engine(1)
    stream = gateway.stream()
    await stream.request(STREAM, sent=POSTED)
    assert GatewayStream.set_headers(await stream.receive())["traceparent"] == POSTED["traceparent"]


async def test_a_tracestate_passes_on_with_the_trace_context_that_it_belongs_to_only(gateway: Gateway) -> None:
    await gateway.add_engine(1)
    for traceparent, removed in ((POSTED["traceparent"], []), ("invalid", ["tracestate"])):
        stream = gateway.stream()
        await stream.request(STREAM, sent={**POSTED, "traceparent": traceparent, "tracestate": "v=1", "baggage": "b=1"})
        mutation = (await stream.receive()).request_headers.response.header_mutation
        assert [name for name in mutation.remove_headers if name in {"tracestate", "baggage"}] == removed
