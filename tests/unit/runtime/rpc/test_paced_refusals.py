"""Calls beyond the limits of their callers are refused before their requests are read, at a limited rate."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext

import pytest
from kvrouter.net.rpc import call_gate
from kvrouter.runtime.rpc import Metadata, RpcServer
from kvrouter.v1.errors import RateLimited

from ....hostile_peer import hostile_peer, message_head
from .rpc_harness import WORKER, Worker

ABORT = f"/{WORKER.full_name}/Abort"


class ExhaustedGuard:
    def check(self, method: str, metadata: Metadata) -> None:
        raise RateLimited("the key has used its requests", 1000)

    def admit(self, method: str, metadata: Metadata, size: int) -> AbstractContextManager[None]:
        return nullcontext()


async def test_refusals_wait_for_their_turn_and_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_gate, "_REFUSALS_PER_SECOND", 0.001)
    monkeypatch.setattr(call_gate, "_MAX_REFUSAL_SECONDS", 1e6)
    server = RpcServer("127.0.0.1:0")
    server.add_service(WORKER, Worker(), guard=ExhaustedGuard())
    await server.start()
    server.grpc.gate.refusals.limit = 4
    async with hostile_peer(server.endpoint()) as peer, asyncio.timeout(30):
        for _ in range(10):
            peer.data(peer.open(ABORT), message_head(60 << 20) + b"x" * 10_000)
        while len(peer.ended) < 6:
            await asyncio.sleep(0.005)
        assert len(server.grpc.gate.refusals) == 4
        assert server.grpc.gate.refusals.evicted == 6
        assert server.grpc.gate.calls == 0
    await server.drain(0)
