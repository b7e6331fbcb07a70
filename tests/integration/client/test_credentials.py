"""The client shows a key, and checks the Frontend's certificate."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvrouter.client import Client, NotConnected, PermissionDenied, Unauthenticated
from kvrouter.devtools.system.certificates import DevelopmentAuthority
from kvrouter.v1.frontend_pb2 import ListModelsResponse, Model
from kvrouter.v1.frontend_pb2_grpc import FrontendServiceServicer, add_FrontendServiceServicer_to_server

from ..frontend.access.keys import Keys
from ..frontend.gateway import MODEL, running_system


class OneModel(FrontendServiceServicer):
    async def ListModels(self, request: Any, context: Any) -> ListModelsResponse:  # noqa: N802 - the contract's name
        return ListModelsResponse(models=[Model(name="secured")])


@pytest.fixture
def authority(tmp_path: Path) -> DevelopmentAuthority:
    return DevelopmentAuthority(tmp_path / "certificates")


@pytest.fixture
async def secured(authority: DevelopmentAuthority) -> AsyncIterator[str]:
    """The address of a Frontend with TLS."""
    issued = authority.issue("frontend")
    server = grpc.aio.server()
    add_FrontendServiceServicer_to_server(OneModel(), server)
    credentials = grpc.ssl_server_credentials([(issued.key.read_bytes(), issued.cert.read_bytes())])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


async def test_calls_show_the_key(nats_url: str, etcd_endpoint: str, namespace: str, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    for role in ("client", "admin"):
        keys.add(role, role=role)
    keys.write()
    async with running_system(nats_url, etcd_endpoint, namespace, **keys.options()) as system:
        await system.start_worker(1)
        async with Client(system.target, model=MODEL) as client:
            with pytest.raises(Unauthenticated) as refused:
                await client.generate([1])
            assert refused.value.code is grpc.StatusCode.UNAUTHENTICATED
        async with Client(system.target, model=MODEL, api_key=lambda: keys["client"]) as client:
            assert len(await (await client.generate([1])).tokens()) == 16
            await client.best_worker([1], request_id="mine")
            assert await client.mark_prefill_complete("mine")
            assert await client.free("mine")
            with pytest.raises(PermissionDenied):
                await client.dump_events()


async def test_a_frontend_with_a_trusted_certificate_is_called(secured: str, authority: DevelopmentAuthority) -> None:
    trusting = grpc.ssl_channel_credentials(authority.certificate_path.read_bytes())
    async with Client(secured, credentials=trusting) as client:
        assert [model.name for model in await client.list_models()] == ["secured"]


async def test_a_frontend_with_another_certificate_is_not_called(secured: str, tmp_path: Path) -> None:
    other = DevelopmentAuthority(tmp_path / "other")
    distrusting = grpc.ssl_channel_credentials(other.certificate_path.read_bytes())
    async with Client(secured, credentials=distrusting, reconnect_seconds=0) as client:
        with pytest.raises(NotConnected):
            await client.list_models()
