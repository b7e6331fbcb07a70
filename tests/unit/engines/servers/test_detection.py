"""Which engine answers at an address."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kvrouter.engines.servers.detection import detect
from kvrouter.engines.servers.http import EngineAway, EngineHttp, UnexpectedAnswer
from kvrouter.engines.servers.sglang.api import SglangApi
from kvrouter.engines.servers.vllm.api import VllmApi

SGLANG_INFO = {"model_path": "m"}
UNAVAILABLE = object()


class Pages(EngineHttp):
    """An engine with some pages, of which some fail."""

    def __init__(self, **pages: Any) -> None:
        self.pages = {"/health": {}, **{f"/{name}": page for name, page in pages.items()}}

    async def get(self, path: str) -> bytes:
        page = self.pages.get(path)
        if page is UNAVAILABLE:
            raise EngineAway(f"GET {path}: 500")
        if page is None:
            raise UnexpectedAnswer(f"GET {path}: 404", 404)
        return json.dumps(page).encode()


def models(owner: str | None) -> dict[str, Any]:
    return {"data": [{"id": "m"} | ({} if owner is None else {"owned_by": owner})]}


def engine(owner: str | None, **pages: Any) -> Pages:
    http = Pages(**pages)
    http.pages["/v1/models"] = models(owner)
    return http


@pytest.mark.parametrize(
    ("http", "kind"),
    [
        (engine("vllm", server_info=UNAVAILABLE), VllmApi),
        (engine("sglang", server_info=SGLANG_INFO), SglangApi),
        (engine(None, get_server_info=SGLANG_INFO), SglangApi),
        (engine(None, server_info={"vllm_config": "text"}), VllmApi),
        (Pages(server_info=SGLANG_INFO), SglangApi),
        (Pages(), VllmApi),
    ],
)
async def test_an_engine_is_known_by_its_models_or_by_its_description(http: Pages, kind: type) -> None:
    assert isinstance(await detect(http, "auto"), kind)


async def test_an_engine_that_is_not_ready_is_asked_again() -> None:
    with pytest.raises(EngineAway):
        await detect(engine("sglang", server_info=UNAVAILABLE), "auto")
