"""What a gateway gets from the endpoint picker, and what it books."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody, HttpHeaders, ProtocolConfiguration
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvrouter.devtools.system.ports import free_port
from kvrouter.devtools.system.small_tokenizer import write_small_tokenizer
from kvrouter.frontend.text.client_work import completed
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.tracing.configuration import TracingMetrics
from kvrouter.runtime.tracing.recording import recording
from kvrouter.v1.common_pb2 import BusyThresholds
from kvrouter.v1.scheduler_pb2 import GetStatusRequest, SetBusyThresholdRequest
from prometheus_client import CollectorRegistry

from tests.integration.runtime.tracing.collector import collecting

from ....waiting import until
from ...sidecar.rig import write_engine_keys
from ..gateway import MODEL, System, running_system
from .gateway_stream import headers
from .picking import Gateway

BODY = {"model": MODEL, "prompt": list(range(100)), "max_tokens": 8, "stream": True, "unknown": {"kept": True}}
BUSY = SetBusyThresholdRequest(model=MODEL, thresholds=BusyThresholds(active_decode_blocks_threshold=0.0))


async def test_a_choice_is_a_span_of_the_gateways_trace(gateway: Gateway) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    await gateway.add_engine(1)
    metrics = TracingMetrics(CollectorRegistry())
    async with collecting() as collector, recording(collector.url, 0.0, {"service.name": "picker"}, metrics):
        stream = gateway.stream()
        await stream.request(BODY, sent={"traceparent": f"00-{trace}-{parent}-01"})
        await stream.receive()
        await collector.until(lambda: bool(collector.of_trace(trace)))
        stream.call.cancel()
        (picked,) = [each for each in collector.of_trace(trace) if each.name == "pick endpoint"]
        assert picked.span.parent_span_id.hex() == parent
        assert (picked.attributes["gen_ai.request.model"], picked.attributes["kvrouter.request_id"]) == (MODEL, "r-1")


async def queued_requests(system: System) -> int:
    status = await system.scheduler.get_status(GetStatusRequest(queued_requests=1), deadline=Deadline.after(10))
    return status.components[0].queued.requests


async def test_a_request_is_routed_unchanged_and_freed_at_the_end_of_its_response(gateway: Gateway) -> None:
    endpoint = await gateway.add_engine(1)
    stream = gateway.stream()
    await stream.request(BODY, pieces=3)
    answer = await stream.receive()
    assert stream.set_headers(answer) == {"x-gateway-destination-endpoint": endpoint, "x-request-id": "r-1"}
    await stream.receive()
    await gateway.until_booked(1)
    events = [b'data: {"a": 1}\n\n', b'data: {"b', b'": 2}\n\n', b"data: [DONE]\n\n"]
    assert await stream.respond(*events, served=endpoint) == b"".join(events)
    assert (await gateway.system.loads())[1].active_requests == 1
    await stream.end()
    await gateway.until_booked(0)


async def test_a_chat_is_routed_by_the_tokens_of_its_rendered_prompt(gateway: Gateway, tmp_path: Path) -> None:
    write_small_tokenizer(tmp_path)
    engines = {worker_id: await gateway.add_engine(worker_id, tokenizer=str(tmp_path)) for worker_id in (1, 2)}
    frontend = gateway.system.frontend
    await until(lambda: frontend.models.has_text(MODEL))
    text = frontend.models.texts.get(MODEL, "messages")
    messages = [{"role": "user", "content": "Tell me about prefix caches. " * 40}]
    template = text.template
    assert template is not None
    tokens = completed(
        text.tokenizer.encode(completed(template.rendering(messages)), special_tokens=False, limit=10_000)
    )
    stream = gateway.stream()
    endpoints, _ = await stream.routed({"model": MODEL, "messages": messages, "field_of_the_engine": 1})
    worker_id = next(number for number, endpoint in engines.items() if endpoint == endpoints[0])
    of_another = 1
    loads = await gateway.system.loads()
    assert loads[worker_id].potential_prefill_tokens == len(tokens) // 4 + of_another
    await stream.send(response_headers=HttpHeaders(headers=headers()))
    assert stream.set_headers(await stream.receive())["x-kvrouter-routed-on"] == "tokens"


async def test_a_chat_without_a_tokenizer_is_routed_on_an_estimate_and_says_so(gateway: Gateway) -> None:
    await gateway.add_engine(1)
    stream = gateway.stream()
    await stream.routed({"model": MODEL, "messages": [{"role": "user", "content": "x"}]})
    await stream.send(response_headers=HttpHeaders(headers=headers()))
    assert stream.set_headers(await stream.receive())["x-kvrouter-routed-on"] == "estimate"


async def test_engines_get_the_key_of_their_component_instead_of_the_clients(
    tmp_path: Path, nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    address = f"127.0.0.1:{free_port()}"
    options = {"endpoint_picker_bind": address, "engine_keys_file": write_engine_keys(tmp_path / "keys", workers="key")}
    async with running_system(nats_url, etcd_endpoint, namespace, **options) as system:
        gateway = Gateway(system, address)
        await gateway.add_engine(1)
        stream = gateway.stream()
        await stream.request(BODY, sent={"authorization": "Bearer client"})
        assert stream.set_headers(await stream.receive())["authorization"] == "Bearer key"
        without_body = gateway.stream()
        await without_body.send(request_headers=HttpHeaders(headers=headers(), end_of_stream=True))
        assert without_body.set_headers(await without_body.receive())["authorization"] == "Bearer key"
        await gateway.channel.close()


async def test_a_long_body_passes_in_pieces_that_envoy_accepts(gateway: Gateway) -> None:
    await gateway.add_engine(1)
    body = b'{"model": "%s", "prompt": "%s"}' % (MODEL.encode(), b"x" * 300_000)
    _, passed = await gateway.stream().routed(body, pieces=7)
    assert passed == body


async def test_the_prefill_is_complete_with_the_first_piece(gateway: Gateway) -> None:
    endpoint = await gateway.add_engine(1)
    stream = gateway.stream()
    await stream.routed(BODY)
    await gateway.until_booked(1)
    of_another = 1
    assert (await gateway.system.loads())[1].potential_prefill_tokens == 100 + of_another
    await stream.respond(b"data: {}\n\n", served=endpoint)
    async with asyncio.timeout(30):
        while (await gateway.system.loads())[1].potential_prefill_tokens != of_another:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", ["cancelled", "half-closed"])
async def test_a_client_that_disconnects_leaves_no_booking(gateway: Gateway, how: str) -> None:
    await gateway.add_engine(1)
    stream = gateway.stream()
    await stream.routed(BODY)
    await gateway.until_booked(1)
    if how == "cancelled":
        stream.call.cancel()
    else:
        await stream.call.done_writing()
    await gateway.until_booked(0)


async def test_a_client_that_disconnects_in_the_queue_leaves_nothing(
    nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with running_system(
        nats_url,
        etcd_endpoint,
        namespace,
        scheduling={"router_mode": "forecast"},
        endpoint_picker_bind=address,
    ) as system:
        gateway = Gateway(system, address)
        await gateway.add_engine(1, ranks={0: 10})
        first, second = gateway.stream(), gateway.stream()
        await first.routed(BODY)
        await second.request(BODY | {"prompt": list(range(500, 600))})
        async with asyncio.timeout(30):
            while await queued_requests(system) != 1:
                await asyncio.sleep(0.01)
        await second.call.done_writing()
        assert await second.call.read() is grpc.aio.EOF
        await first.call.done_writing()
        await gateway.until_booked(0)
        await gateway.channel.close()


async def test_only_allowed_endpoints_are_picked(gateway: Gateway) -> None:
    await gateway.add_engine(1)
    second = await gateway.add_engine(2)
    for _ in range(3):
        endpoints, _ = await gateway.stream().routed(BODY, allowed=[second, "10.0.0.1:80"])
        assert endpoints == [second]
    for allowed in ([], ["10.0.0.1:80"]):
        status, _, error = await gateway.stream().refused(BODY, allowed=allowed)
        assert (status, error["type"]) == (503, "server_error")


async def test_other_endpoints_are_fallbacks_and_the_one_that_served_is_booked(gateway: Gateway) -> None:
    first, second = await gateway.add_engine(1), await gateway.add_engine(2)
    stream = gateway.stream()
    endpoints, _ = await stream.routed(BODY)
    assert sorted(endpoints) == [first, second]
    await stream.respond(b"data: {}\n\n", served=endpoints[1])
    await gateway.until_booked(*((0, 1) if endpoints[0] == first else (1, 0)))
    await stream.end()
    await gateway.until_booked(0, 0)


async def test_a_rank_is_named_in_a_header(gateway: Gateway) -> None:
    await gateway.add_engine(1, ranks={0: 1000, 1: 1000})
    ranks = set()
    for _ in range(4):
        stream = gateway.stream()
        await stream.request(BODY)
        ranks.add(stream.set_headers(await stream.receive())["x-data-parallel-rank"])
    assert ranks == {"0", "1"}


async def test_busy_workers_are_429_with_a_time_to_retry(gateway: Gateway) -> None:
    await gateway.add_engine(1)
    await gateway.system.frontend.set_busy_threshold(BUSY, deadline=Deadline.after(10))
    running = gateway.stream()
    await running.routed(BODY)
    status, sent, error = await gateway.stream().refused(BODY)
    assert (status, error["type"]) == (429, "rate_limit_error")
    assert int(sent["retry-after"]) >= 1
    assert sent["x-request-id"] == "r-1"
    await running.end()


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"[]", 400, None),
        (b"\xff", 400, None),
        (b'{"model": 5, "prompt": [1]}', 400, "model"),
        ({"model": MODEL, "prompt": [1, -1]}, 400, "prompt.1"),
        ({"model": "other", "prompt": [1]}, 404, "model"),
        (b'{"a":' + b"[" * 100_000, 400, None),
    ],
)
async def test_an_invalid_body_is_refused_and_books_nothing(
    gateway: Gateway, body: Any, status: int, param: str | None
) -> None:
    await gateway.add_engine(1)
    received, _, error = await gateway.stream().refused(body)
    assert (received, error["param"]) == (status, param)
    await gateway.until_booked(0)


async def test_a_request_without_a_body_goes_to_any_endpoint(gateway: Gateway) -> None:
    endpoint = await gateway.add_engine(1)
    stream = gateway.stream()
    await stream.send(request_headers=HttpHeaders(headers=headers(), end_of_stream=True))
    assert stream.set_headers(await stream.receive())["x-gateway-destination-endpoint"] == endpoint
    await gateway.until_booked(0)


@pytest.mark.parametrize("mode", [ProcessingMode.STREAMED, ProcessingMode.NONE])
async def test_the_error_of_another_body_mode_names_the_correct_one(gateway: Gateway, mode: Any) -> None:
    stream = gateway.stream()
    modes = ProtocolConfiguration(request_body_mode=mode)
    await stream.send(request_headers=HttpHeaders(headers=headers()), protocol_config=modes)
    with pytest.raises(grpc.aio.AioRpcError, match="expected request_body_mode FULL_DUPLEX_STREAMED or BUFFERED, rec"):
        await stream.receive()


async def test_messages_out_of_order_end_their_own_stream_only(gateway: Gateway) -> None:
    endpoint = await gateway.add_engine(1)
    stream = gateway.stream()
    await stream.send()
    with pytest.raises(grpc.aio.AioRpcError, match="expected headers, a body or trailers"):
        await stream.receive()
    early = gateway.stream()
    await early.send(response_body=HttpBody(body=b"x"))
    await early.receive()
    assert (await gateway.stream().routed(BODY))[0] == [endpoint]


async def test_health_follows_readiness_and_liveness_does_not(gateway: Gateway) -> None:
    stub: Any = health_pb2_grpc.HealthStub(gateway.channel)

    async def status(service: str) -> int:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        return int(answer.status)

    serving = health_pb2.HealthCheckResponse.SERVING
    assert await status("liveness") == serving
    await gateway.add_engine(1)
    for service in ("readiness", "envoy.service.ext_proc.v3.ExternalProcessor", ""):
        async with asyncio.timeout(30):
            while await status(service) != serving:
                await asyncio.sleep(0.01)
