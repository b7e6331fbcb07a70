"""The web page and its data, served by a Frontend."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ..access.keys import Keys
from ..gateway import MODEL, System, running_system

PAGE_FILES = ("", "page.js", "charts.js", "page.css")


async def get(system: System, path: str, key: str = "") -> tuple[int, aiohttp.ClientResponse, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{system.http}{path}", headers=headers, allow_redirects=False) as response,
    ):
        body = await (response.json() if response.content_type == "application/json" else response.text())
        return response.status, response, body


async def complete(system: System) -> None:
    body = {"model": MODEL, "prompt": list(range(64)), "max_tokens": 2}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{system.http}/v1/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()


async def test_the_page_and_its_data(nats_url: str, etcd_endpoint: str, namespace: str) -> None:
    async with running_system(nats_url, etcd_endpoint, namespace) as system:
        await system.start_worker(1)
        for _ in range(5):
            await complete(system)
        await system.until_idle()

        status, response, _ = await get(system, "/")
        assert (status, response.headers["Location"]) == (302, "/ui/")
        for name in PAGE_FILES:
            status, response, text = await get(system, f"/ui/{name}")
            assert status == 200
            assert "default-src 'none'" in response.headers["Content-Security-Policy"]
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), "nothing comes from elsewhere"

        _, _, data = await get(system, "/ui/data/overview")
        (component,) = data["components"]
        assert component["model"] == MODEL
        assert [rank["rank"] for rank in component["ranks"]] == ["1:0"]
        assert {"Scheduler", "Frontend"} <= {each["kind"] for each in data["services"]}
        traffic = data["traffic"]
        assert traffic["requests_per_second"] * traffic["seconds"] == pytest.approx(5)
        assert traffic["output_tokens_per_second"] * traffic["seconds"] == pytest.approx(10)
        assert 0 < traffic["ttft_seconds"]["p50"] <= traffic["ttft_seconds"]["p99"]
        assert traffic["errors"] == []
        latest = max(data["decisions"], key=lambda each: each["at"])
        assert latest["rank"] == "1:0"
        (prefix,) = data["prefixes"]
        assert (prefix["model"], prefix["requests"]) == (MODEL, 8), (
            "two of five requests are in the sample of one in four"
        )

        path = f"/ui/data/decisions/{latest['id']}?scheduler={latest['scheduler']}"
        status, _, decision = await get(system, path)
        assert status == 200
        assert [each["rank"] for each in decision["candidates"]] == ["1:0"]


async def test_http_errors_are_counted_by_status_and_code_wherever_they_arise(
    nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    async with running_system(nats_url, etcd_endpoint, namespace) as system, aiohttp.ClientSession() as session:
        await system.start_worker(1)
        for body in ({"model": "unknown", "prompt": [1]}, {"model": MODEL, "prompt": [1], "max_tokens": -1}):
            async with session.post(f"http://{system.http}/v1/completions", json=body) as response:
                assert response.status >= 400
        async with session.get(f"http://{system.http}/v1/nothing") as response:
            assert response.status == 404
        _, _, data = await get(system, "/ui/data/overview")
        counted = {each["error"]: each["total"] for each in data["traffic"]["http_errors"]}
        assert counted == {"400 invalid_argument": 1, "404 model_not_found": 1, "404": 1}


async def test_only_known_schedulers_are_asked(nats_url: str, etcd_endpoint: str, namespace: str) -> None:
    async with running_system(nats_url, etcd_endpoint, namespace) as system:
        status, _, body = await get(system, "/ui/data/decisions/1?scheduler=127.0.0.1:1")
        assert (status, "is known" in body["error"]["message"]) == (404, True)
        for number in ("-1", "x", str(1 << 64), "²"):
            status, _, body = await get(system, f"/ui/data/decisions/{number}?scheduler=127.0.0.1:1")
            assert (status, body["error"]["param"]) == (400, "decision_id")


async def test_the_page_can_be_switched_off(nats_url: str, etcd_endpoint: str, namespace: str) -> None:
    async with running_system(nats_url, etcd_endpoint, namespace, web_page=False) as system:
        assert system.frontend.runner.popular_prefixes is None
        assert [(await get(system, path))[0] for path in ("/", "/ui/", "/ui/data/overview")] == [404, 404, 404]


async def test_data_needs_the_role_admin(nats_url: str, etcd_endpoint: str, namespace: str, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    keys.add("client")
    keys.add("admin", role="admin")
    keys.write()
    async with running_system(nats_url, etcd_endpoint, namespace, **keys.options()) as system:
        assert [(await get(system, f"/ui/{name}"))[0] for name in PAGE_FILES] == [200] * len(PAGE_FILES)
        for path in ("/ui/data/overview", "/ui/data/decisions/1?scheduler=s"):
            assert [(await get(system, path, key))[0] for key in ("", "wrong", keys["client"])] == [401, 401, 403]
        await system.start_worker(1)
        status, _, data = await get(system, "/ui/data/overview", keys["admin"])
        assert status == 200
        assert not any("Frontend" in problem["what"] for problem in data["problems"])
        frontends = {each["address"]: each["detail"] for each in data["services"] if each["kind"] == "Frontend"}
        assert frontends.pop("this Frontend") == "0 calls at workers"
        assert all("asks this Frontend for an API key" in detail for detail in frontends.values())
