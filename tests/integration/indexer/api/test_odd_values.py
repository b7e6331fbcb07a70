"""An Indexer under requests whose values nobody means."""

from __future__ import annotations

import grpc.aio
import pytest
from kvrouter.v1.names import ComponentName

from ....odd_values import OddValues, nothing_fails
from ..event_batches import RankSource, tokens
from ..indexing import connected
from ..serving import DESCRIPTOR, Stack, serving, settings_for

pytestmark = pytest.mark.timeout(240)


async def test_no_value_makes_a_call_fail(etcd_endpoint: str, nats_url: str, namespace: str) -> None:
    component = ComponentName(namespace, "workers")
    known = {"namespace": [namespace], "name": ["workers"], "worker_id": [7], "dp_rank": [0], "block_size": [16]}
    settings = settings_for(etcd_endpoint, nats_url, component)
    async with (
        serving(settings, "stub") as (indexer, server, directory),
        connected(nats_url) as nats,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        stack = Stack(indexer, server, nats, directory, component=component, etcd=etcd_endpoint)
        await stack.create_component()
        source = RankSource(component, 7)
        await stack.register(source)
        await source.stored(tokens(6), 100).publish(nats.jetstream())
        await stack.follows(source)
        await nothing_fails(channel, DESCRIPTOR, OddValues(known), times=40, leave_out=("Resync", "Verify"))
        await stack.find(tokens(6))
