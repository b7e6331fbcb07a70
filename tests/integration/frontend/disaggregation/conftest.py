from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from .fleet import Fleet, running_fleet


@pytest.fixture
async def fleet(nats_url: str, etcd_endpoint: str, namespace: str) -> AsyncIterator[Fleet]:
    async with running_fleet(nats_url, etcd_endpoint, namespace) as running:
        yield running
