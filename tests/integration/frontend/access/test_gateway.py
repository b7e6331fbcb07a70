"""Who may call engines through a gateway with the endpoint picker."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest
from kvrouter.devtools.system.ports import free_port
from kvrouter.publisher.worker import WorkerConfig, running
from kvrouter.v1.names import ComponentName

from ..endpoint_picker.gateway_stream import GatewayStream
from ..gateway import MODEL, System, running_system
from .keys import Keys

BODY = {"model": MODEL, "prompt": list(range(100)), "max_tokens": 8, "cache_salt": "s", "kept": {"by": "the engine"}}
PATH = {":path": "/v1/completions?x=1"}


@dataclass(frozen=True)
class Gateway:
    """A system with an endpoint picker and one engine."""

    system: System
    channel: grpc.aio.Channel

    async def passed(self, key: str, **fields: object) -> tuple[dict[str, object], list[str]]:
        """Sends a request, and returns the body for the engine and the headers that it does not get."""
        stream = GatewayStream(self.channel)
        await stream.request(BODY | fields, sent=PATH | {"authorization": f"Bearer {key}"})
        answer = await stream.receive()
        assert answer.HasField("request_headers"), answer
        body = (await stream.receive()).request_body.response.body_mutation.streamed_response.body
        await stream.call.done_writing()
        return json.loads(body), list(answer.request_headers.response.header_mutation.remove_headers)

    async def status(self, path: str = "/v1/completions", **sent: str) -> int:
        """Sends a request that is refused, and returns its HTTP status."""
        return (await GatewayStream(self.channel).refused(BODY, sent={":path": path, **sent}))[0]


@pytest.fixture
async def gateway(nats_url: str, etcd_endpoint: str, namespace: str, keys: Keys) -> AsyncIterator[Gateway]:
    address = f"127.0.0.1:{free_port()}"
    options: dict[str, Any] = {"endpoint_picker_bind": address, "api_keys": str(keys.path)}
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
                ranks={0: 1000},
            )
        ),
        grpc.aio.insecure_channel(address) as channel,
    ):
        await system.until_candidate(1)
        yield Gateway(system, channel)


async def test_a_gateways_client_is_authenticated(gateway: Gateway, keys: Keys) -> None:
    assert await gateway.status() == 401
    assert await gateway.status(authorization=f"Bearer {keys['revoked']}") == 401
    assert await gateway.status(authorization=f"Bearer {keys['other']}") == 403
    # An engine has more calls than those that run a model.
    assert await gateway.status("/v1/load_lora_adapter", authorization=f"Bearer {keys['client']}") == 403
    assert await gateway.status("/v1/models", authorization=f"Bearer {keys['client']}") == 403


async def test_an_engine_gets_no_credential_and_the_salt_of_the_tenant(gateway: Gateway, keys: Keys) -> None:
    body, removed = await gateway.passed(keys["client"])
    assert body == BODY | {"cache_salt": "tenant:t:s"}
    assert removed == ["authorization", "x-api-key"]
    assert (await gateway.passed(keys["admin"]))[0] == BODY
    # A salt that looks like a tenant's leads into no tenant's cache.
    forged, _ = await gateway.passed(keys["admin"], cache_salt="tenant:t:s")
    assert forged["cache_salt"] == "tenant::tenant:t:s"
