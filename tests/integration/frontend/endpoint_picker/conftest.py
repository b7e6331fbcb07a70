"""A gateway for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from kvrouter.devtools.system.ports import free_port

from ..gateway import running_system
from .picking import Gateway


@pytest.fixture
async def gateway(nats_url: str, etcd_endpoint: str, namespace: str) -> AsyncIterator[Gateway]:
    address = f"127.0.0.1:{free_port()}"
    async with running_system(nats_url, etcd_endpoint, namespace, endpoint_picker_bind=address) as system:
        made = Gateway(system, address)
        yield made
        await made.channel.close()
