"""The router predicts the cached tokens that a real vLLM reports of chats with images."""

from __future__ import annotations

import base64
import json
import random
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from .engine import MODEL, Published, VllmServer
from .media_model import png, write_media_model
from .routed import Way, Where, routing

pytestmark = pytest.mark.timeout(900)

REQUESTS = 120
SIZES = ((56, 56), (224, 112), (150, 333), (640, 480))
RECORDED = json.loads((Path(__file__).parents[2] / "unit" / "engines" / "image_ids.json").read_text())


@pytest.fixture(scope="module")
def seeing(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A server of a model that takes images."""
    if subprocess.run((vllm_python, "-c", "import torchvision"), capture_output=True, check=False).returncode:
        pytest.skip("this vLLM lacks torchvision, which `make vllm` installs")
    model = write_media_model(tmp_path_factory.mktemp("model"))
    options = ("--limit-mm-per-prompt", '{"image": 9, "video": 0}')
    server = VllmServer(vllm_python, model, tmp_path_factory.mktemp("vllm"), options)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
async def pictures() -> AsyncIterator[list[str]]:
    """URLs of images that vLLM fetches."""

    async def serve(request: web.Request) -> web.Response:
        return web.Response(body=png(100, 80, seed=int(request.match_info["seed"])), content_type="image/png")

    app = web.Application()
    app.add_routes([web.get("/{seed}.png", serve)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield [f"http://127.0.0.1:{port}/{seed}.png" for seed in range(3)]
    await runner.cleanup()


def embedded(content: bytes) -> str:
    return "data:image/x;base64," + base64.b64encode(content).decode()


def chats(seed: int, urls: list[str]) -> Iterator[dict[str, Any]]:
    """Yields chats of texts and images whose prefixes repeat. Every second one is streamed."""
    draw = random.Random(seed)
    sources = [embedded(png(*size, seed=seed, has_alpha=seed == 1)) for size in SIZES for seed in range(2)]
    sources += [f"data:image/x;base64,{image['file']}" for image in RECORDED["images"]]
    conversations: list[list[dict[str, Any]]] = [[]]
    for number in range(REQUESTS):
        begun = draw.choice(conversations)
        parts: list[dict[str, Any]] = [{"type": "text", "text": "word " * draw.randrange(60)}]
        for _ in range(draw.randrange(3)):
            source = draw.choice(urls if draw.random() < 0.2 else sources)
            parts.append({"type": "image_url", "image_url": {"url": source}})
            parts.append({"type": "text", "text": draw.choice(("What is this? ", "Describe it at length. "))})
        conversations.append([*begun[-2:], {"role": "user", "content": parts}])
        body: dict[str, Any] = {"messages": conversations[-1], "max_tokens": draw.randint(1, 9)}
        yield body | ({"stream": True} if number % 2 else {})


@pytest.mark.parametrize("way", ["sidecar", "one-process"])
async def test_predicted_cached_tokens_of_images_are_those_that_vllm_reports(
    way: Way, where: Where, tmp_path: Path, seeing: VllmServer, pictures: list[str]
) -> None:
    await seeing.ready()
    assert await seeing.post("/reset_prefix_cache", {}) == {"success": True}
    published = Published(seeing)
    embedded: Counter[int] = Counter()
    linked: Counter[int] = Counter()
    estimated: Counter[int] = Counter()
    """Predicted minus reported tokens: of prompts with images in their bodies only, with URLs, of unknown length."""
    cached = 0
    async with routing(way, where, tmp_path, seeing) as routed:
        for body in chats(len(way), pictures):
            answer = await routed.post(body | {"model": MODEL})
            assert answer.status == 200, answer.body
            known = linked if "http://" in json.dumps(body) else embedded
            difference = answer.predicted - answer.reported
            (known if answer.routed_on == "tokens" else estimated)[difference] += 1
            cached += answer.reported
            await routed.until_applied(published)
    results = {"embedded": embedded, "linked": linked, "estimated": estimated, "cached": cached}
    (tmp_path / "result.json").write_text(json.dumps(results))
    assert cached > 0
    assert embedded.total() > REQUESTS / 3
    assert set(embedded) == {0}
    assert max([*linked, *estimated]) <= 0
    # A prompt with a URL is predicted from one before it, sent when all of its lengths were known.
    assert linked[0] > linked.total() / 2
