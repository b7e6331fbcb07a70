"""Bookings and sessions that clients make count against the limits of their callers while they live."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from kvrouter.v1 import frontend_pb2_grpc
from kvrouter.v1.common_pb2 import BookingKey, RoutingRequest, TokenIds
from kvrouter.v1.error_encoding import from_rpc_error
from kvrouter.v1.errors_pb2 import ErrorReason
from kvrouter.v1.frontend_pb2 import FrontendServiceFreeRequest, FrontendServiceSelectWorkerRequest, KeepSessionRequest

from ..gateway import MODEL, System, request, running_system
from .keys import Keys


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    made = Keys(tmp_path / "keys.json")
    made.add("limited", tokens_per_minute=1000, concurrency=1)
    made.add("other")
    made.write()
    return made


@pytest.fixture
async def guarded(nats_url: str, etcd_endpoint: str, namespace: str, keys: Keys) -> AsyncIterator[System]:
    options: dict[str, Any] = {"api_keys": str(keys.path), "max_sessions_per_caller": 1, "max_bookings_per_caller": 2}
    async with running_system(nats_url, etcd_endpoint, namespace, **options) as system:
        await system.start_worker(1)
        yield system


class Client:
    """A client with a key."""

    def __init__(self, channel: grpc.aio.Channel, key: str) -> None:
        self._metadata = (("authorization", f"Bearer {key}"),)
        self._stub: Any = frontend_pb2_grpc.FrontendServiceStub(channel)  # type: ignore[no-untyped-call]

    async def book(self, name: str, *, tokens: int = 40, **fields: Any) -> str:
        """Books a prompt and returns the name of the status code, or of the limit that was reached."""
        routing = RoutingRequest(model=MODEL, token_ids=TokenIds(ids=range(tokens)))
        booking = FrontendServiceSelectWorkerRequest(request=routing, booking=BookingKey(request_id=name), **fields)
        return await _outcome(self._stub.SelectWorker(booking, metadata=self._metadata))

    async def release(self, name: str) -> None:
        await self._stub.Free(FrontendServiceFreeRequest(booking=BookingKey(request_id=name)), metadata=self._metadata)

    async def generate(self) -> str:
        async def run() -> None:
            async for _ in self._stub.Generate(request(), metadata=self._metadata):
                pass

        return await _outcome(run())

    def keep_session(self, session_id: str) -> Any:
        return self._stub.KeepSession(KeepSessionRequest(session_id=session_id), metadata=self._metadata)


async def _outcome(call: Any) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as failed:
        limited = from_rpc_error(failed).info.reason == ErrorReason.ERROR_REASON_RATE_LIMITED
        return "limited" if limited else failed.code().name
    return "OK"


@pytest.fixture
async def channel(guarded: System) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(guarded.target) as opened:
        yield opened


async def until_booked(client: Client, name: str, **fields: Any) -> None:
    async with asyncio.timeout(30):
        while await client.book(name, **fields) != "OK":
            await asyncio.sleep(0.05)


async def test_a_booking_is_a_running_request_of_its_caller(channel: grpc.aio.Channel, keys: Keys) -> None:
    limited, other = Client(channel, keys["limited"]), Client(channel, keys["other"])
    assert await limited.book("first") == "OK"
    assert await limited.book("second") == "limited"
    assert await limited.generate() == "limited"
    assert await limited.book("first") == "OK"  # Which renews it.
    assert await other.generate() == "OK"
    await limited.release("first")
    assert await limited.generate() == "OK"


async def test_a_booking_has_no_more_than_the_tokens_of_a_minute(
    guarded: System, channel: grpc.aio.Channel, keys: Keys
) -> None:
    limited = Client(channel, keys["limited"])
    assert await limited.book("large", tokens=1001) == "limited"
    assert await guarded.booked() == [0]
    assert await limited.book("small", tokens=600) == "OK"
    await limited.release("small")
    # Its rank was kept free for it.
    assert await limited.book("another", tokens=600) == "limited"


async def test_a_booking_counts_until_its_lease_is_over(channel: grpc.aio.Channel, keys: Keys) -> None:
    limited = Client(channel, keys["limited"])
    assert await limited.book("first", lease_ms=300) == "OK"
    await until_booked(limited, "second")


async def test_a_booking_counts_until_its_session_ends(channel: grpc.aio.Channel, keys: Keys) -> None:
    limited = Client(channel, keys["limited"])
    session = limited.keep_session("s")
    await session.read()
    assert await limited.book("first", session_id="s") == "OK"
    assert await limited.book("second", session_id="s") == "limited"
    session.cancel()
    await until_booked(limited, "second")


async def test_leases_bookings_and_sessions_of_a_caller_have_limits(channel: grpc.aio.Channel, keys: Keys) -> None:
    other = Client(channel, keys["other"])
    assert await other.book("long", lease_ms=3_600_001) == "INVALID_ARGUMENT"
    assert await other.book("none", lease_ms=0) == "INVALID_ARGUMENT"
    assert [await other.book(name) for name in ("a", "b", "c")] == ["OK", "OK", "limited"]
    first = other.keep_session("one")
    await first.read()
    assert await _outcome(other.keep_session("two").read()) == "limited"
    first.cancel()
    async with asyncio.timeout(30):
        while await _outcome(other.keep_session("two").read()) != "OK":
            await asyncio.sleep(0.05)
