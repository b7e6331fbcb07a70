from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from .gateway import System, running_system


@pytest.fixture
async def system(nats_url: str, etcd_endpoint: str, namespace: str) -> AsyncIterator[System]:
    async with running_system(nats_url, etcd_endpoint, namespace) as running:
        yield running


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    """Ends what a test starts besides the system."""
    async with AsyncExitStack() as running:
        yield running
