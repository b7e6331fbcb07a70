from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from .rig import Beside, Sidecar, beside


@pytest.fixture
def run(namespace: str, etcd_endpoint: str, nats_url: str) -> Beside:
    """Runs a sidecar beside engines."""

    def run(*urls: str, **options: Any) -> AbstractAsyncContextManager[Sidecar]:
        return beside(namespace, etcd_endpoint, nats_url, *urls, **options)

    return run
