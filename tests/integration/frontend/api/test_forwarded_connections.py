"""What becomes of a connection to a client, and of an address of workers, when forwarding goes wrong."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kvrouter.frontend.proxy.forwarded_response import ForwardedResponse

from ..gateway import System, running_system
from .test_forwarding import WHOLE, answer, chat, post, start_engine

PAGE = "https://chat.example.org"


async def answer_at_length(request: web.Request, body: Any) -> web.StreamResponse:
    return web.Response(body=b"x" * (4 << 20), content_type="application/json")


async def test_a_defect_after_the_head_ends_the_connection_and_not_the_body(
    system: System, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def break_down(_: ForwardedResponse) -> None:
        raise RuntimeError("a defect")

    engine = await start_engine(system, stack, 1)
    engine.respond = answer_at_length
    with monkeypatch.context() as patched:
        patched.setattr(ForwardedResponse, "drain", break_down)
        with pytest.raises(aiohttp.ClientPayloadError):
            await post(system, chat())
    await system.until_idle()
    engine.respond = answer
    assert (await post(system, chat()))[1] == WHOLE


async def vary(request: web.Request, body: Any) -> web.StreamResponse:
    response = web.Response(body=WHOLE, content_type="application/json")
    response.headers["Access-Control-Allow-Origin"] = "*"
    response.headers.extend([("Vary", "Accept"), ("vary", "Cookie")])
    return response


async def test_what_a_response_of_an_engine_varies_by_is_kept_besides_the_origin(
    nats_url: str, etcd_endpoint: str, namespace: str, stack: AsyncExitStack
) -> None:
    async with running_system(nats_url, etcd_endpoint, namespace, cors_origins=[PAGE]) as system:
        engine = await start_engine(system, stack, 1)
        engine.respond = vary
        url = f"http://{system.http}/v1/chat/completions"
        async with aiohttp.ClientSession() as http:
            async with http.post(url, data=chat(), headers={"Origin": PAGE}) as response:
                assert response.headers.getall("Access-Control-Allow-Origin") == [PAGE]
                assert response.headers.getall("Vary") == ["Origin", "Accept", "Cookie"]
            async with http.post(url, data=chat()) as response:
                assert response.headers.getall("Vary") == ["Accept", "Cookie"]
        await system.until_idle()
        await stack.aclose()


async def test_workers_that_are_registered_at_one_address_get_their_own_requests(
    system: System, stack: AsyncExitStack
) -> None:
    """An address is registered twice until the lease of the worker that had it before ends."""
    engines = {each: await start_engine(system, stack, each, advertise="127.0.0.1:9") for each in (1, 2)}
    served: dict[int, int] = {1: 0, 2: 0}
    for number in range(12):
        body = chat(messages=[{"role": "user", "content": f"{number} " * 200}])
        response, _ = await post(system, body)
        served[int(response.headers["x-kvrouter-worker"].partition(":")[0])] += 1
        assert served == {each: len(engine.bodies) for each, engine in engines.items()}
    assert all(served.values())
    await system.until_idle()
