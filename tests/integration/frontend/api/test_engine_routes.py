"""Other inference routes of engines are passed on; their management routes are not."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
from kvrouter.engines.routes import PASSED_ROUTES

from ..access.keys import Keys
from ..gateway import MODEL, running_system
from .test_forwarding import WHOLE, start_engine

MANAGEMENT = (
    *("/sleep", "/wake_up", "/reset_prefix_cache", "/flush_cache", "/collective_rpc", "/update_weights_from_disk"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/server_info", "/start_profile", "/pause", "/abort_request"),
    *("/v1/embeddings/../sleep", "/v1/%2e%2e/sleep", "/v1//embeddings", "/v1/embeddings/x", "/inference/v1/generate"),
)


async def test_inference_passes_and_management_does_not(
    nats_url: str, etcd_endpoint: str, namespace: str, stack: AsyncExitStack
) -> None:
    async with running_system(nats_url, etcd_endpoint, namespace) as system, aiohttp.ClientSession() as http:
        engine = await start_engine(system, stack, 1, engine="vllm")
        served = [path for path in PASSED_ROUTES if path.startswith("/v1/")]
        for path in served:
            body: Any = {"model": MODEL, "input": "x", "odd": 1}
            async with http.post(f"http://{system.http}{path}", json=body) as response:
                assert (response.status, await response.read()) == (200, WHOLE), path
                assert response.headers["x-kvrouter-worker"].startswith("1:")
                assert response.headers["x-kvrouter-routed-on"] == "load"
        assert len(engine.bodies) == len(served)
        for managing in MANAGEMENT:
            for method in ("GET", "POST"):
                async with http.request(method, f"http://{system.http}{managing}", json={"model": MODEL}) as response:
                    assert response.status in (404, 405), managing
        assert len(engine.bodies) == len(served)
        async with http.get(f"http://{system.http}/v1/models/{MODEL}") as response:
            routes = (await response.json())["routes"]
        assert {"/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/embeddings", "/pooling"} <= set(routes)
        assert "/v1/images/generations" not in routes
        await system.until_idle()


async def test_a_form_passes_by_its_model(
    nats_url: str, etcd_endpoint: str, namespace: str, stack: AsyncExitStack
) -> None:
    async with running_system(nats_url, etcd_endpoint, namespace) as system, aiohttp.ClientSession() as http:
        engine = await start_engine(system, stack, 1)
        engine.reads_json = False
        form = aiohttp.FormData({"model": MODEL, "language": "en"})
        form.add_field("file", b"RIFF" + bytes(1000), filename="a.wav")
        async with http.post(f"http://{system.http}/v1/audio/transcriptions", data=form) as response:
            assert (response.status, await response.read()) == (200, WHOLE)
        assert b"RIFF" in engine.bodies[0]
        await system.until_idle()


async def test_a_model_over_tokens_has_no_such_routes(nats_url: str, etcd_endpoint: str, namespace: str) -> None:
    async with running_system(nats_url, etcd_endpoint, namespace) as system, aiohttp.ClientSession() as http:
        await system.start_worker(1)
        async with http.post(f"http://{system.http}/v1/embeddings", json={"model": MODEL, "input": "x"}) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "model"
        async with http.get(f"http://{system.http}/v1/models") as response:
            (model,) = (await response.json())["data"]
        assert model["routes"] == ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"]


async def test_clients_with_a_key_have_only_routes_whose_fields_are_known(
    nats_url: str, etcd_endpoint: str, namespace: str, stack: AsyncExitStack, tmp_path: Path
) -> None:
    keys = Keys(tmp_path / "keys.json")
    keys.add("client", models=[MODEL])
    keys.add("admin", role="admin")
    keys.write()
    options: dict[str, Any] = keys.options() | {"engine_routes": ("/v1/embeddings", "/v1/rerank", "/rerank")}
    async with running_system(nats_url, etcd_endpoint, namespace, **options) as system, aiohttp.ClientSession() as http:
        await start_engine(system, stack, 1, engine="vllm")
        expected = {
            ("client", "/v1/embeddings"): 200,
            ("client", "/v1/rerank"): 403,
            ("client", "/rerank"): 403,
            ("admin", "/v1/rerank"): 200,
            ("admin", "/v1/score"): 404,
        }
        for (key, path), status in expected.items():
            headers = {"authorization": f"Bearer {keys[key]}"}
            body = {"model": MODEL, "input": "x"}
            async with http.post(f"http://{system.http}{path}", json=body, headers=headers) as response:
                assert response.status == status, (key, path, await response.text())
        headers = {"authorization": f"Bearer {keys['client']}"}
        wrong = {"model": MODEL, "input": "x", "kv_transfer_params": {}}
        async with http.post(f"http://{system.http}/v1/embeddings", json=wrong, headers=headers) as response:
            assert response.status == 403
        await system.until_idle()
