"""Bodies that the endpoint picker reads in part or not at all, and those that the gateway keeps."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse, ProtocolConfiguration
from kvrouter.devtools.system.ports import free_port
from kvrouter.frontend.schedulers.link_pool import SchedulerLinks
from kvrouter.publisher.worker import running

from ....waiting import until
from ..gateway import MODEL, running_system
from .gateway_stream import GatewayStream
from .picking import Gateway
from .test_endpoint_picker import queued_requests

BODY = {"model": MODEL, "prompt": list(range(100)), "max_tokens": 8}
FORM = b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n--x--\r\n'
KEPT = ProtocolConfiguration(request_body_mode=ProcessingMode.BUFFERED, response_body_mode=ProcessingMode.STREAMED)


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        (FORM % (b"model", MODEL.encode()), {"content_type": "multipart/form-data; boundary=x"}),
        (FORM % (b"file", b"sound"), {"content_type": "multipart/form-data; boundary=x"}),
        (b"\x00\xff" * 50_000, {"content_type": "application/octet-stream"}),
        (b"[1, 2]", {"content_type": "text/plain"}),
        (b"\x28\xb5\x2f\xfd", {"content_type": "application/json", "content_encoding": "zstd"}),
        (b'{"prompt": [1, 2, 3]}', {"content_type": "application/json"}),
        (b'{"model": "", "input": "text"}', {}),
    ],
    ids=["form", "form without model", "bytes", "list", "unknown encoding", "no model", "empty model"],
)
async def test_a_body_that_only_the_engine_reads_passes_unchanged(
    gateway: Gateway, body: bytes, sent: dict[str, str]
) -> None:
    endpoint = await gateway.add_engine(1)
    assert await gateway.stream().routed(body, sent=sent) == ([endpoint], body)
    await gateway.until_booked(1)


async def test_a_text_that_nobody_has_counted_is_never_too_long(gateway: Gateway) -> None:
    endpoint = await gateway.add_engine(1, max_model_len=1000)
    text = {"model": MODEL, "prompt": "word " * 30_000}
    assert (await gateway.stream().routed(text))[0] == [endpoint]
    counted = {"model": MODEL, "prompt": list(range(1000))}
    assert (await gateway.stream().refused(counted))[0] == 400


async def test_a_body_without_a_model_is_refused_where_several_are_served(gateway: Gateway) -> None:
    await gateway.add_engine(1)
    async with running(gateway.config(2, model="other", component="others")):
        directory = gateway.system.runtime.directory
        await until(lambda: [len(view.workers) for view in directory.components.values()] == [1, 1])
        status, _, error = await gateway.stream().refused({"prompt": [1]})
    assert (status, error["param"]) == (404, "model")


async def test_a_compressed_body_is_routed_by_its_prompt_and_passes_decompressed(gateway: Gateway) -> None:
    endpoint = await gateway.add_engine(1)
    stream = gateway.stream()
    await stream.request(gzip.compress(json.dumps(BODY).encode()), sent={"content_encoding": "gzip"})
    answer = await stream.receive()
    assert stream.set_headers(answer)["x-gateway-destination-endpoint"] == endpoint
    assert "content-encoding" in answer.request_headers.response.header_mutation.remove_headers
    passed = (await stream.receive()).request_body.response.body_mutation.streamed_response
    assert json.loads(passed.body) == BODY
    of_another = 1
    assert (await gateway.system.loads())[1].potential_prefill_tokens == 100 + of_another


async def test_a_damaged_compressed_body_is_refused(gateway: Gateway) -> None:
    await gateway.add_engine(1)
    damaged = gzip.compress(json.dumps(BODY).encode())[:-9]
    assert (await gateway.stream().refused(damaged, sent={"content_encoding": "gzip"}))[0] == 400


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_a_body_that_the_gateway_keeps_is_answered_at_its_end(gateway: Gateway, encoding: str) -> None:
    endpoint = await gateway.add_engine(1)
    body = json.dumps(BODY).encode()
    stream = gateway.stream()
    sent = {"content_encoding": encoding}
    await stream.request(gzip.compress(body) if encoding == "gzip" else body, sent=sent, modes=KEPT)
    assert (await stream.receive()).HasField("request_headers")
    answer = await _chosen(stream)
    mutation = answer.request_body.response
    added = {each.header.key: each.header.raw_value.decode() for each in mutation.header_mutation.set_headers}
    assert added["x-gateway-destination-endpoint"] == endpoint
    assert answer.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == endpoint
    assert mutation.body_mutation.body == (body if encoding == "gzip" else b"")
    assert added.get("content-length") == (str(len(body)) if encoding == "gzip" else None)
    await gateway.until_booked(1)
    stream.call.cancel()
    await gateway.until_booked(0)


async def test_a_gateway_that_waits_for_a_queued_request_is_asked_for_more_time(
    nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    address = f"127.0.0.1:{free_port()}"
    options: dict[str, Any] = {"scheduling": {"router_mode": "forecast"}, "endpoint_picker_bind": address}
    async with running_system(nats_url, etcd_endpoint, namespace, request_timeout_seconds=100.0, **options) as system:
        gateway = Gateway(system, address)
        await gateway.add_engine(1, ranks={0: 8})
        first, second = gateway.stream(), gateway.stream()
        await first.request(BODY, modes=KEPT)
        await first.receive()
        await _chosen(first)
        await second.request(BODY | {"prompt": list(range(1000, 1100))}, modes=KEPT)
        await second.receive()
        assert (await second.receive()).override_message_timeout.seconds == 100
        # A busy picker asks for more time before its request is in the queue.
        async with asyncio.timeout(30):
            while await queued_requests(system) != 1:
                await asyncio.sleep(0.01)
        first.call.cancel()
        assert (await second.receive()).HasField("request_body")
        await gateway.channel.close()


async def test_a_picker_that_is_not_ready_leaves_requests_to_the_gateway(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    await gateway.add_engine(1)
    monkeypatch.setattr(SchedulerLinks, "ready", lambda _: False)
    stream = gateway.stream()
    # Nothing is sent: the picker ends the call as soon as it begins, and sending would race with that.
    with pytest.raises(grpc.aio.AioRpcError, match="not ready"):
        await stream.receive()


async def _chosen(stream: GatewayStream) -> ProcessingResponse:
    """Receives the answer to a body, after a request for more time if the machine is busy."""
    answer = await stream.receive()
    return answer if answer.HasField("request_body") else await stream.receive()


async def test_a_name_of_the_file_of_models_is_replaced_by_its_first_ready_model(
    nats_url: str, etcd_endpoint: str, namespace: str, tmp_path: Path
) -> None:
    names, address = tmp_path / "models.toml", f"127.0.0.1:{free_port()}"
    await asyncio.to_thread(names.write_text, f'[models.chat]\nserves = "absent"\nfallbacks = ["{MODEL}"]\n')
    options: dict[str, Any] = {"endpoint_picker_bind": address, "models_file": str(names)}
    async with running_system(nats_url, etcd_endpoint, namespace, **options) as system:
        gateway = Gateway(system, address)
        endpoint = await gateway.add_engine(1)
        endpoints, body = await gateway.stream().routed(BODY | {"model": "chat"})
        assert (endpoints, json.loads(body)) == ([endpoint], BODY)
        await gateway.until_booked(1)
        await gateway.channel.close()
