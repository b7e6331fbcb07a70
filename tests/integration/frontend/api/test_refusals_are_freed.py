"""Requests that are refused leave nothing behind that only the cyclic garbage collector would free."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import aiohttp
import pytest
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import (
    BookingKey,
    LocalHashes,
    RoutingConstraints,
    RoutingOverrides,
    RoutingRequest,
    TokenIds,
)
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.frontend_pb2 import FrontendServiceGetPotentialLoadsRequest, FrontendServiceSelectWorkerRequest
from kvrouter.v1.worker_pb2 import StopConditions

from ....garbage import no_request_is_garbage
from ..gateway import MODEL, System, request

TIMES = 3


async def refused(call: Awaitable[Any]) -> None:
    try:
        await call
    except KvRouterError:
        return
    pytest.fail("the request was not refused")


async def drained(stream: Any) -> None:
    async for _ in stream:
        pass


GENERATE: dict[str, dict[str, Any]] = {
    "too long": {"token_ids": TokenIds(ids=[0] * 9000)},
    "unknown model": {"model": "nobody"},
    "no tokens asked for": {"stop_conditions": StopConditions(max_tokens=0)},
    "unknown mode": {"overrides": RoutingOverrides(mode="best")},
    "unknown worker": {"constraints": RoutingConstraints(worker_id=99)},
    "excluded": {"constraints": RoutingConstraints(excluded_worker_ids=[1])},
    "refused by the engine": {
        "token_ids": TokenIds(ids=range(8100)),
        "stop_conditions": StopConditions(max_tokens=5000),
    },
}


@pytest.mark.parametrize("fields", GENERATE.values(), ids=GENERATE.keys())
async def test_generate(system: System, fields: dict[str, Any]) -> None:
    await system.start_worker(1)
    with no_request_is_garbage():
        for _ in range(TIMES):
            await refused(drained(system.client.generate(request(**fields), deadline=Deadline.after(10))))
        await system.until_idle()


ROUTING: dict[str, dict[str, Any]] = {
    "unknown model": {"model": "nobody", "token_ids": TokenIds(ids=[1] * 100)},
    "empty": {},
    "wrong block size": {"local_hashes": LocalHashes(hashes=[1]), "prompt_tokens": 40, "block_size": 32},
    "unknown worker": {"token_ids": TokenIds(ids=[1] * 100), "constraints": RoutingConstraints(worker_id=99)},
}


@pytest.mark.parametrize("fields", ROUTING.values(), ids=ROUTING.keys())
async def test_best_worker_and_potential_loads(system: System, fields: dict[str, Any]) -> None:
    await system.start_worker(1)
    routing = RoutingRequest(**({"model": MODEL} | fields))
    with no_request_is_garbage():
        for _ in range(TIMES):
            best = FrontendServiceSelectWorkerRequest(request=routing, booking=BookingKey(request_id="x"))
            await refused(system.client.select_worker(best, deadline=Deadline.after(10)))
            loads = FrontendServiceGetPotentialLoadsRequest(request=routing)
            await refused(system.client.get_potential_loads(loads, deadline=Deadline.after(10)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "mock-model", "prompt": [[]]}',
        b'{"model": "mock-model", "prompt": [' + b"1," * 100_000 + b"1]}",
        b'{"model": "mock-model", "prompt": [' + b"1," * 100_000 + b"-1]}",
        b'{"model": "nobody", "prompt": [1]}',
        b'{"model": "mock-model", "prompt": [1], "max_tokens": 0}',
        b"{",
    ],
)
async def test_http(system: System, body: bytes, stream: bool) -> None:
    await system.start_worker(1)
    if stream:
        body = body.replace(b"{", b'{"stream": true, ', 1)
    async with aiohttp.ClientSession(f"http://{system.http}") as session:
        with no_request_is_garbage():
            for _ in range(TIMES):
                async with session.post("/v1/completions", data=body) as response:
                    assert response.status >= 400
                    await response.read()
