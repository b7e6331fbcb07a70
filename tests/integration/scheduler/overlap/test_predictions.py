"""``--no-kv-events``: overlaps without NATS and without an Indexer."""

from __future__ import annotations

import socket

from kvrouter.v1.common_pb2 import BookingKey
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import FreeRequest

from ..scheduling import routing, scheduling, selecting, soon


async def test_it_predicts_from_bookings_without_nats(etcd_endpoint: str, namespace: str) -> None:
    component = ComponentName(namespace, "decode")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nats = f"nats://127.0.0.1:{unused.getsockname()[1]}"
        async with scheduling(component, etcd_endpoint, nats, kv_events=False) as stack:
            await stack.register(1, 2, 3)
            assert stack.service.ready
            first = await stack.select(selecting("a", routing(6)))
            await stack.scheduler.free(FreeRequest(booking=BookingKey(request_id="a")), deadline=soon())
            again = await stack.select(selecting("b", routing(8)))
            assert (first.overlap_blocks, first.load_only) == (0, False)
            assert (again.rank, again.overlap_blocks, again.load_only) == (first.rank, 6, False)
            other = await stack.select(selecting("c", routing(8, seed=1)))
            assert other.rank != first.rank
            queued = {load.rank.worker_id: load.overlap_blocks for load in await stack.loads(routing(8))}
            assert queued[first.rank.worker_id] == 7, "the last block is computed again"
            assert sum(queued.values()) == 7
