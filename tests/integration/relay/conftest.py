"""Engines of these tests, and relays beside them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from .engine import Beside, Engine, Relay, relaying, settings


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture
async def mute() -> AsyncIterator[Engine]:
    """An engine without a replay socket."""
    engine = Engine(replays=False)
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture
def beside(namespace: str, etcd_endpoint: str, nats_url: str) -> Beside:
    """Runs a relay beside an engine."""

    def run(engine: Engine, /, **options: Any) -> AbstractAsyncContextManager[Relay]:
        return relaying(settings(namespace, etcd_endpoint, nats_url, engine, **options), engine)

    return run
