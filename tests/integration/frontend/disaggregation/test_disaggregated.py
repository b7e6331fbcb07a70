"""Requests in a fleet with prefill and decode pools."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from kvrouter.v1.worker_pb2 import StopConditions

from .fleet import DECODE, PREFILL, Fleet, running_fleet

STYLES = ("sequential", "concurrent")


@pytest.fixture
async def fleet(nats_url: str, etcd_endpoint: str, namespace: str) -> AsyncIterator[Fleet]:
    async with running_fleet(nats_url, etcd_endpoint, namespace) as running:
        yield running


@pytest.mark.parametrize("style", STYLES)
async def test_a_prefill_worker_computes_a_long_prompt_for_a_decode_worker(fleet: Fleet, style: str) -> None:
    await fleet.start(1, DECODE)
    await fleet.start(2, PREFILL, handover=style)
    served = await fleet.serve(stop_conditions=StopConditions(max_tokens=5))
    assert len(served.tokens) == 5
    assert (served.routing[0].rank.worker_id, served.prefill) == (1, 2)
    assert "to transfer 100 tokens" in served.routing[0].prefill_reason
    assert len(served.routing) == 1
    assert fleet.prefills("remote") == 1
    await fleet.until_idle()
