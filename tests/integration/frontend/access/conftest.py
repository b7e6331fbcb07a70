from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kvrouter.frontend.access.key_file import TenantEntry

from ..gateway import System, running_system
from .keys import Keys


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    """Keys of two tenants, of an administrator, and some that are not valid."""
    made = Keys(tmp_path / "keys.json")
    made.add("client", tenant="t", models=["mock-model"])
    made.add("other", tenant="u", models=["another-model"])
    made.add("admin", role="admin")
    made.add("revoked", revoked=1)
    made.add("expired", expires=1)
    made.tenants = [TenantEntry(name="t", isolated=True)]
    made.write()
    return made


@pytest.fixture
async def guarded(nats_url: str, etcd_endpoint: str, namespace: str, keys: Keys) -> AsyncIterator[System]:
    """A system with authentication, and one worker."""
    async with running_system(nats_url, etcd_endpoint, namespace, **keys.options()) as system:
        await system.start_worker(1)
        yield system
