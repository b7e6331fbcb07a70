"""Images are a part of the key by which the endpoint picker finds their prompts again."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody, HttpHeaders
from kvrouter.devtools.system.ports import free_port

from ....byte_tokenizer import write_byte_tokenizer
from ....waiting import until
from ..gateway import MODEL, running_system
from .gateway_stream import headers
from .picking import Gateway

BLOCK = 16
LENGTH = 10 * BLOCK
"""Tokens that the engine makes of an image."""
BEFORE = "x" * (2 * BLOCK - len("<|user|>\n"))
AFTER = "y" * 20
PROMPT_TOKENS = 2 * BLOCK + LENGTH + len(AFTER) + len("\n<|assistant|>\n")
FILES = [
    image["file"]
    for image in json.loads((Path(__file__).parents[3] / "unit" / "engines" / "image_ids.json").read_text())["images"]
]


def chat(source: str) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": source}}
    content = [{"type": "text", "text": BEFORE}, image, {"type": "text", "text": AFTER}]
    return {"model": MODEL, "messages": [{"role": "user", "content": content}]}


async def send(gateway: Gateway, body: dict[str, Any]) -> tuple[str, int, str]:
    """Returns on what a request was routed, the blocks that were expected in the engine's cache, and its endpoint."""
    stream = gateway.stream()
    endpoints, passed = await stream.routed(body)
    assert json.loads(passed) == body
    await stream.send(response_headers=HttpHeaders(headers=headers(content_type="application/json")))
    added = stream.set_headers(await stream.receive())
    response = {"usage": {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 1}}
    await stream.send(response_body=HttpBody(body=json.dumps(response).encode()))
    await stream.receive()
    await stream.end()
    await gateway.until_booked(0, 0)
    return added["x-kvrouter-routed-on"], int(added["x-kvrouter-overlap-blocks"]), endpoints[0]


@pytest.fixture
async def gateway(nats_url: str, etcd_endpoint: str, namespace: str) -> AsyncIterator[Gateway]:
    address = f"127.0.0.1:{free_port()}"
    options: dict[str, Any] = {"endpoint_picker_bind": address, "scheduling": {"router_mode": "kv"}}
    async with running_system(nats_url, etcd_endpoint, namespace, **options) as system:
        made = Gateway(system, address)
        yield made
        await made.channel.close()


async def test_an_image_sent_again_is_routed_to_its_cache(gateway: Gateway, tmp_path: Path) -> None:
    tokenizer = str(write_byte_tokenizer(tmp_path / "model", media=True))
    for worker_id in (1, 2):
        await gateway.add_engine(worker_id, tokenizer=tokenizer, engine="vllm", publishes_events=False)
    await until(lambda: gateway.system.frontend.models.has_text(MODEL))
    sources = [f"data:image/png;base64,{FILES[0]}", f"data:image/png;base64,{FILES[1]}", "https://a/b.png"]
    assert (await send(gateway, chat(sources[0])))[0] != "tokens", "the length of images was unknown"
    _, overlap, endpoint = await send(gateway, chat(sources[0]))
    assert overlap <= 2, "the text before the image"
    again = await send(gateway, chat(sources[0]))
    assert again == ("tokens", PROMPT_TOKENS // BLOCK, endpoint)
    assert (await send(gateway, chat(sources[1])))[:2] == ("tokens", 2)
    assert (await send(gateway, chat(sources[2])))[0] != "tokens"
    assert (await send(gateway, chat(sources[2])))[0] == "tokens"
    assert (await send(gateway, chat(sources[2])))[:2] == ("tokens", PROMPT_TOKENS // BLOCK)
