from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from kvrouter.net.nats.client import TolerantClient

from .indexing import connected


@pytest.fixture
async def connection(nats_url: str) -> AsyncIterator[TolerantClient]:
    """To the NATS that tests share."""
    async with connected(nats_url) as connection:
        yield connection
