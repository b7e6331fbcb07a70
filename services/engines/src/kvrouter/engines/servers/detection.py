"""Finds out which engine answers at an address."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

from kvrouter.engines.servers.api import EngineApi
from kvrouter.engines.servers.description import Models
from kvrouter.engines.servers.http import EngineHttp, UnexpectedAnswer
from kvrouter.engines.servers.sglang.api import SglangApi
from kvrouter.engines.servers.sglang.discovery import read_server_info
from kvrouter.engines.servers.vllm.api import VllmApi

EngineKindOption = Literal["auto", "vllm", "sglang"]


async def detect(http: EngineHttp, kind: EngineKindOption) -> EngineApi:
    """Returns the API of the engine, which must be ready: SGLang's if it describes itself as SGLang does.

    vLLM names itself in its list of models. In developer mode it also has ``/server_info``, which may be slow or fail.

    Raises:
        EngineAway: the engine does not answer, or is not ready yet.
        UnexpectedAnswer: it refuses to say whether it is ready.
    """
    await http.get("/health")
    if kind == "vllm":
        return VllmApi(http)
    if kind == "sglang":
        return SglangApi(http)
    with suppress(UnexpectedAnswer):
        models = await http.get_as("/v1/models", Models)
        if any(each.owned_by == "vllm" for each in models.data):
            return VllmApi(http)
    try:
        await read_server_info(http)
    except UnexpectedAnswer:
        return VllmApi(http)
    return SglangApi(http)
