"""Ids, headers and names of fields that a client chose neither split a response nor mean two things."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import BookingKey, RoutingRequest, TokenIds
from kvrouter.v1.errors import BadRequest
from kvrouter.v1.frontend_pb2 import (
    FrontendServiceFreeRequest,
    FrontendServiceMarkPrefillCompleteRequest,
    FrontendServiceSelectWorkerRequest,
)

from ..gateway import MODEL, System, request

SPLITTING = ("a\r\nSet-Cookie: x=1", "a\nb", "a\x00", "a\x7f", "\x85", "a\u2028b")
COMPLETION = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 2}


@pytest.mark.parametrize("request_id", SPLITTING)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_id_in_a_body_splits_no_response(system: System, request_id: str, stream: bool) -> None:
    await system.start_worker(1)
    body = COMPLETION | {"request_id": request_id, "stream": stream}
    url = f"http://{system.http}/v1/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as response:
        assert response.status == 400
        assert "Set-Cookie" not in response.headers
        assert (await response.json())["error"]["param"] == "request_id"


@pytest.mark.parametrize("request_id", SPLITTING)
async def test_an_id_in_a_call_is_refused(system: System, request_id: str) -> None:
    await system.start_worker(1)
    key = BookingKey(request_id=request_id)
    routing = RoutingRequest(model=MODEL, token_ids=TokenIds(ids=[1]))
    client, deadline = system.client, Deadline.after(10)

    async def generate() -> None:
        async for _ in client.generate(request(request_id=request_id), deadline=deadline):
            pass

    for call in (
        generate(),
        client.select_worker(
            FrontendServiceSelectWorkerRequest(request=routing, booking=key, lease_ms=1000), deadline=deadline
        ),
        client.mark_prefill_complete(FrontendServiceMarkPrefillCompleteRequest(booking=key), deadline=deadline),
        client.free(FrontendServiceFreeRequest(booking=key), deadline=deadline),
    ):
        with pytest.raises(BadRequest, match="control characters"):
            await call


HEADERS = (
    "x-request-id",
    "x-data-parallel-rank",
    "authorization",
    "x-api-key",
    "traceparent",
    "tracestate",
    "user-agent",
)


@pytest.mark.parametrize("name", [*HEADERS, "content-encoding", "content-type", "accept-encoding"])
async def test_a_header_that_is_not_utf8_is_never_an_internal_error(system: System, name: str) -> None:
    await system.start_worker(1)
    body = json.dumps(COMPLETION).encode()
    host, port = system.http.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n{name}: "
    writer.write(head.encode() + b"\xff\xfe\r\n\r\n" + body)
    async with asyncio.timeout(30):
        status = int((await reader.readline()).split()[1])
    writer.close()
    assert status == (400 if name in ("x-request-id", "x-data-parallel-rank", "content-encoding") else 200)


DOUBLED: tuple[tuple[str, Any], ...] = (
    ("/v1/completions", '{"model":"mock-model","prompt":[1,2],"max_tokens":1,"prompt":[3]}'),
    ("/v1/completions", '{"model":"other","prompt":[1,2],"max_tokens":1,"model":"mock-model"}'),
    ("/v1/chat/completions", '{"model":"mock-model","messages":[{"role":"user","content":"a","cont\\u0065nt":"b"}]}'),
    ("/busy_threshold", '{"model":"mock-model","model":"other"}'),
)


@pytest.mark.parametrize(("path", "body"), DOUBLED)
async def test_a_field_that_is_there_twice_is_refused(system: System, path: str, body: str) -> None:
    await system.start_worker(1)
    async with aiohttp.ClientSession() as http, http.post(f"http://{system.http}{path}", data=body) as response:
        assert response.status == 400
        assert "twice" in (await response.json())["error"]["message"]
