"""Who may call engines through a gateway with the endpoint picker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import grpc.aio
import pytest
from kvrouter.devtools.system.ports import free_port
from kvrouter.engines.fields import HARMLESS, INTERNAL, ROUTED
from kvrouter.frontend.proxy.endpoint_picker import server
from kvrouter.publisher.worker import WorkerConfig, running
from kvrouter.v1.names import ComponentName

from ....waiting import until
from ..endpoint_picker.gateway_stream import GatewayStream
from ..gateway import MODEL, System, running_system
from .keys import Keys

BODY = {"model": MODEL, "prompt": list(range(100)), "max_tokens": 8, "cache_salt": "s", "stop": ["kept"]}
PATH = {":path": "/v1/completions?x=1"}


_NAMED = {"token_ids": "prompt"}
"""Errors over HTTP name fields of the contract as the OpenAI API does."""


@dataclass(frozen=True)
class Gateway:
    """A system with an endpoint picker and one engine."""

    system: System
    channel: grpc.aio.Channel
    address: str

    async def passed(
        self, key: str, sent: Mapping[str, str] = MappingProxyType({}), **fields: object
    ) -> tuple[dict[str, object], list[str]]:
        """Sends a request, and returns the body for the engine and the headers that it does not get."""
        stream = GatewayStream(self.channel)
        await stream.request(BODY | fields, sent=PATH | {"authorization": f"Bearer {key}", **sent})
        answer = await stream.receive()
        assert answer.HasField("request_headers"), answer
        body = (await stream.receive()).request_body.response.body_mutation.streamed_response.body
        await stream.call.done_writing()
        return json.loads(body), list(answer.request_headers.response.header_mutation.remove_headers)

    async def status(self, path: str = "/v1/completions", **sent: str) -> int:
        """Sends a request that is refused, and returns its HTTP status."""
        return (await GatewayStream(self.channel).refused(BODY, sent={":path": path, **sent}))[0]

    async def refused_field(self, key: str, body: Mapping[str, object], path: str) -> str:
        """Sends a request that is refused, and returns the field that the error names."""
        sent = {":path": path, "authorization": f"Bearer {key}"}
        status, _, error = await GatewayStream(self.channel).refused(dict(body), sent=sent)
        assert status == 403
        return error["param"] or ""


@pytest.fixture
async def gateway(nats_url: str, etcd_endpoint: str, namespace: str, keys: Keys) -> AsyncIterator[Gateway]:
    address = f"127.0.0.1:{free_port()}"
    options: dict[str, Any] = {"endpoint_picker_bind": address, **keys.options()}
    async with (
        running_system(nats_url, etcd_endpoint, namespace, **options) as system,
        running(
            WorkerConfig(
                component=ComponentName(namespace, "workers"),
                model=MODEL,
                block_size=16,
                worker_id=1,
                etcd=etcd_endpoint,
                nats=nats_url,
                openai_endpoint="http://127.0.0.1:20001",
                engine="vllm",
                ranks={0: 1000},
            )
        ),
        grpc.aio.insecure_channel(address) as channel,
    ):
        await system.until_candidate(1)
        await until(system.frontend.ready)
        yield Gateway(system, channel, address)


async def test_a_gateways_client_is_authenticated(gateway: Gateway, keys: Keys) -> None:
    assert await gateway.status() == 401
    assert await gateway.status(authorization=f"Bearer {keys['revoked']}") == 401
    assert await gateway.status(authorization=f"Bearer {keys['other']}") == 403
    # An engine has more calls than those that run a model.
    assert await gateway.status("/v1/load_lora_adapter", authorization=f"Bearer {keys['client']}") == 403
    assert await gateway.status("/v1/models", authorization=f"Bearer {keys['client']}") == 403


async def test_an_engine_gets_no_credential_and_the_salt_of_the_tenant(gateway: Gateway, keys: Keys) -> None:
    body, removed = await gateway.passed(keys["client"])
    tenants = keys.salts.of("t", "s")
    assert body == BODY | {"cache_salt": tenants}
    assert removed == ["accept-encoding", "authorization"]
    # The salt of a tenant leads into no tenant's cache.
    for salt in ("s", "tenant:t:s", tenants):
        forged, _ = await gateway.passed(keys["admin"], cache_salt=salt)
        assert forged["cache_salt"] == keys.salts.of("", salt) != tenants


async def test_an_engine_gets_no_header_that_it_obeys_and_no_id_with_addresses(gateway: Gateway, keys: Keys) -> None:
    sent = {"x-override-bootstrap-host": "10.0.0.7", "x-session-id": "s", "accept": "*/*", "x-vllm-priority": "-9"}
    _, removed = await gateway.passed(keys["client"], sent)
    assert removed == sorted({"accept-encoding", "authorization", *sent} - {"accept"})


@pytest.mark.parametrize("path", HARMLESS)
async def test_an_engine_gets_harmless_fields_only(gateway: Gateway, keys: Keys, path: str) -> None:
    for name in sorted(INTERNAL - ROUTED):
        assert await gateway.refused_field(keys["client"], {"model": MODEL, name: "x"}, path) == _NAMED.get(name, name)


async def test_an_isolated_tenant_uses_no_path_without_a_salt(gateway: Gateway, keys: Keys) -> None:
    body = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}
    for path in ("/v1/messages", "/v1/embeddings"):
        without = {name: value for name, value in body.items() if name != "max_tokens" or "embed" not in path}
        assert await gateway.refused_field(keys["client"], without, path) == ""
        stream = GatewayStream(gateway.channel)
        await stream.request(without, sent={":path": path, "authorization": f"Bearer {keys['admin']}"})
        assert (await stream.receive()).HasField("request_headers")
        await stream.call.done_writing()


async def test_a_gateways_client_sees_no_transfer_parameters(gateway: Gateway, keys: Keys) -> None:
    stream = GatewayStream(gateway.channel)
    await stream.request(BODY, sent=PATH | {"authorization": f"Bearer {keys['client']}"})
    for _ in range(2):
        await stream.receive()
    event = b'data: {"choices": [], "kv_transfer_params": {"remote_host": "10.0.0.7"}}\n\n'
    assert await stream.respond(event) == b'data: {"choices": [], "kv_transfer_params": null}\n\n'
    await stream.end()


async def refused_for_ever(channel: grpc.aio.Channel) -> None:
    while True:
        assert (await GatewayStream(channel).refused(BODY, sent=PATH))[0] == 401


async def test_a_refused_request_s_stream_ends(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_OPENING_SECONDS", 0.1)
    stream = GatewayStream(gateway.channel)
    assert (await stream.refused(BODY, sent=PATH))[0] == 401
    assert await stream.call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_peer_that_floods_with_requests_without_a_key_is_disconnected(gateway: Gateway, keys: Keys) -> None:
    async with grpc.aio.insecure_channel(gateway.address, [("grpc.use_local_subchannel_pool", 1)]) as flooding:
        # How gRPC reports a lost connection depends on what it was doing.
        with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
            await refused_for_ever(flooding)
    # One connection may carry clients with a key and others.
    await gateway.passed(keys["client"])
    for _ in range(100):
        assert await gateway.status() == 401
