from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from .gateway import System, running_system


@pytest.fixture
async def system(nats_url: str, etcd_endpoint: str, namespace: str) -> AsyncIterator[System]:
    async with running_system(nats_url, etcd_endpoint, namespace) as running:
        yield running
