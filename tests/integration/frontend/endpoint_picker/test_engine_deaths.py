"""Deaths of engines that run a gateway's requests: the picker notes them for the prompt, and refuses it after two."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpHeaders
from google.protobuf.struct_pb2 import Struct

from ..gateway import MODEL
from .gateway_stream import GatewayStream, headers
from .picking import Gateway

BODY = {"model": MODEL, "prompt": list(range(100)), "max_tokens": 8, "stream": True}
OTHER = BODY | {"prompt": list(range(50))}
EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'
RESET = "upstream_reset_before_response_started"
TERMINATED = f"{RESET}{{connection_termination}}"
REFUSED = f"{RESET}{{remote_connection_failure|delayed_connect_error:_Connection_refused}}"


async def add_dead_engines(gateway: Gateway, count: int) -> None:
    """Registers workers whose engines have died: nothing listens at their addresses."""
    for number in range(1, count + 1):
        await gateway.add_engine(number)


async def answer_with(stream: GatewayStream, status: int, details: str = "") -> None:
    """Sends the head of a response, with the details that Envoy gives."""
    attributes = {}
    if details:
        attributes["envoy.filters.http.ext_proc"] = Struct()
        attributes["envoy.filters.http.ext_proc"].update({"response.code_details": details})
    head = headers(content_type="text/plain")
    head.headers.add(key=":status", raw_value=str(status).encode())
    await stream.send(response_headers=HttpHeaders(headers=head), attributes=attributes)
    assert (await stream.receive()).HasField("response_headers")


async def send(gateway: Gateway, status: int, details: str) -> None:
    """Sends the request, to which the gateway answers so."""
    stream = gateway.stream()
    await stream.routed(BODY)
    await answer_with(stream, status, details)
    await stream.end()


def noted(gateway: Gateway) -> float:
    return gateway.system.runtime.registry.get_sample_value("kvrouter_frontend_worker_deaths_total") or 0.0


async def until_noted(gateway: Gateway, number: int) -> None:
    async with asyncio.timeout(30):
        while noted(gateway) < number:
            await asyncio.sleep(0.01)


async def check_refused(gateway: Gateway) -> None:
    status, _, error = await gateway.stream().refused(BODY)
    assert (status, error["code"]) == (400, "failed_precondition"), error
    assert "workers died" in error["message"]
    await gateway.stream().routed(OTHER)


async def test_a_prompt_is_refused_after_two_engines_died_before_they_answered(gateway: Gateway) -> None:
    await add_dead_engines(gateway, 4)
    for number in range(1, 3):
        await send(gateway, 503, TERMINATED)
        await until_noted(gateway, number)
    await check_refused(gateway)


async def test_a_prompt_is_refused_after_two_engines_died_within_their_responses(gateway: Gateway) -> None:
    await add_dead_engines(gateway, 4)
    for number in range(1, 3):
        stream = gateway.stream()
        await stream.routed(BODY)
        await stream.respond(EVENT)
        stream.call.cancel()
        await until_noted(gateway, number)
    await check_refused(gateway)


async def test_engines_that_could_not_be_connected_to_are_no_deaths(gateway: Gateway) -> None:
    await add_dead_engines(gateway, 4)
    for _ in range(4):
        await send(gateway, 503, REFUSED)
    assert not noted(gateway)
    await gateway.stream().routed(BODY)


@pytest.mark.parametrize(("status", "details"), [(500, "via_upstream"), (503, TERMINATED)])
async def test_engines_that_live_are_no_deaths(
    gateway: Gateway, stack: AsyncExitStack, status: int, details: str
) -> None:
    async def healthy(_: web.Request) -> web.Response:
        return web.Response()

    for number in range(1, 4):
        app = web.Application()
        app.router.add_get("/health", healthy)
        runner = web.AppRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        fields: dict[str, Any] = {"openai_endpoint": f"http://127.0.0.1:{runner.addresses[0][1]}"}
        await gateway.add_engine(number, **fields)
    for _ in range(4):
        await send(gateway, status, details)
    stream = gateway.stream()
    await stream.routed(BODY)
    await stream.respond(EVENT)
    stream.call.cancel()
    await gateway.until_booked(0, 0, 0)
    assert not noted(gateway)
    await gateway.stream().routed(BODY)
