"""The session that an agent names in a header is the conversation of its requests on every route."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kvrouter.devtools.system.ports import free_port
from kvrouter.engines.routes import PASSED_ROUTES
from kvrouter.frontend.settings import SESSION_HEADERS
from kvrouter.scheduler.api import request_reader
from kvrouter.v1.common_pb2 import RoutingRequest

from ..endpoint_picker.picking import Gateway
from ..gateway import MODEL, System, running_system
from .speaking import speaking_system
from .test_forwarding import start_engine

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "x", "max_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
    "/v1/responses": {"input": "x", "max_output_tokens": 4},
}


@pytest.fixture
def conversations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The conversations of the requests that the Scheduler reads."""
    seen: list[str] = []
    read = request_reader.conversation_of

    def recorded(request: RoutingRequest) -> bytes:
        seen.append(request.conversation_id)
        return read(request)

    monkeypatch.setattr(request_reader, "conversation_of", recorded)
    return seen


async def check_each_route(
    system: System, conversations: list[str], bodies: Mapping[str, dict[str, Any]] = BODIES
) -> None:
    async with aiohttp.ClientSession() as http:
        for path, body in bodies.items():
            for header in SESSION_HEADERS:
                conversations.clear()
                url, headers = f"http://{system.http}{path}", {header: f"of {path}"}
                async with http.post(url, json={"model": MODEL} | body, headers=headers) as response:
                    assert response.status == 200, await response.text()
                    await response.read()
                assert conversations == [f"of {path}"], (path, header)
            for field in ("conversation_id", "prompt_cache_key"):
                if path == "/v1/messages" and field == "prompt_cache_key":
                    continue
                conversations.clear()
                url, named = f"http://{system.http}{path}", {field: "in the body"}
                async with http.post(url, json={"model": MODEL} | body | named) as response:
                    assert response.status == 200, await response.text()
                    await response.read()
                assert conversations == ["in the body"], (path, field)


async def test_over_tokens(
    nats_url: str, etcd_endpoint: str, namespace: str, tmp_path: Path, conversations: list[str]
) -> None:
    async with speaking_system(nats_url, etcd_endpoint, namespace, tmp_path) as (system, engine):
        engine.says = "Yes, it is."
        await check_each_route(system, conversations)
        conversations.clear()
        async with aiohttp.ClientSession() as http:
            body = {"model": MODEL, "conversation_id": "own"} | BODIES["/v1/messages"]
            headers = {"session-id": "other"}
            async with http.post(f"http://{system.http}/v1/messages", json=body, headers=headers) as response:
                assert response.status == 200
        assert conversations == ["own"]


@pytest.mark.parametrize("kind", ["vllm", ""])
async def test_to_engines(
    nats_url: str, etcd_endpoint: str, namespace: str, stack: AsyncExitStack, conversations: list[str], kind: str
) -> None:
    async with running_system(nats_url, etcd_endpoint, namespace) as system:
        await start_engine(system, stack, 1, engine=kind)
        await check_each_route(system, conversations)
        passed = {path: {"input": "x"} for path in PASSED_ROUTES if path.startswith("/v1/")}
        await check_each_route(system, conversations, passed)


async def test_behind_a_gateway(nats_url: str, etcd_endpoint: str, namespace: str, conversations: list[str]) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with running_system(nats_url, etcd_endpoint, namespace, endpoint_picker_bind=address) as system:
        gateway = Gateway(system, address)
        await gateway.add_engine(1)
        for header in SESSION_HEADERS:
            conversations.clear()
            await gateway.stream().routed({"model": MODEL, "prompt": "x"}, sent={header: "mine"})
            assert conversations == ["mine"]
        await gateway.channel.close()
