"""Web pages of other origins: those that the operator allows may call the HTTP API, no others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ..access.keys import Keys
from ..gateway import MODEL, System, running_system

PAGE = "https://chat.example.org"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": list(range(40)), "max_tokens": 3} | fields


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    made = Keys(tmp_path / "keys.json")
    made.add("client")
    made.write()
    return made


@pytest.fixture
async def allowing(
    nats_url: str, etcd_endpoint: str, namespace: str, keys: Keys
) -> AsyncIterator[tuple[System, aiohttp.ClientSession]]:
    """A system with keys that allows one origin, and a client with a key."""
    origins = {"cors_origins": [PAGE, "http://localhost:3000"]}
    async with running_system(nats_url, etcd_endpoint, namespace, **keys.options(), **origins) as system:
        await system.start_worker(1)
        async with aiohttp.ClientSession(f"http://{system.http}", headers={"Origin": PAGE}) as http:
            yield system, http


async def test_a_page_of_an_allowed_origin_gets_every_kind_of_response(
    allowing: tuple[System, aiohttp.ClientSession], keys: Keys
) -> None:
    _, http = allowing
    async with http.options("/v1/chat/completions", headers=PREFLIGHT) as response:
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Origin"] == PAGE
        assert response.headers["Access-Control-Allow-Headers"] == PREFLIGHT["Access-Control-Request-Headers"]
        assert "POST" in response.headers["Access-Control-Allow-Methods"]
    authorized = {"Authorization": f"Bearer {keys['client']}"}
    for sent, status in ((body(), 200), (body(stream=True), 200), (body(n=0), 400)):
        async with http.post("/v1/completions", json=sent, headers=authorized) as response:
            await response.read()
            assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (status, PAGE)
            assert "x-request-id" in response.headers["Access-Control-Expose-Headers"]
            assert response.headers["x-request-id"]
    async with http.post("/v1/completions", json=body()) as response:
        assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (401, PAGE)


async def test_other_origins_are_not_allowed(allowing: tuple[System, aiohttp.ClientSession]) -> None:
    _, http = allowing
    async with http.options("/v1/completions", headers=PREFLIGHT | {"Origin": "https://other.example"}) as response:
        assert response.status in (401, 405)
        assert "Access-Control-Allow-Origin" not in response.headers


async def test_without_the_option_no_origin_is_allowed(system: System) -> None:
    await system.start_worker(1)
    async with aiohttp.ClientSession(f"http://{system.http}", headers={"Origin": PAGE}) as http:
        async with http.post("/v1/completions", json=body()) as response:
            assert response.status == 200
            assert "Access-Control-Allow-Origin" not in response.headers
        async with http.options("/v1/completions", headers=PREFLIGHT) as response:
            assert response.status == 405
