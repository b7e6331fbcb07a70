"""LoRA adapters that are loaded and unloaded while a server runs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from aiohttp import web
from kvrouter.mocker.openai.bodies import parse


class _Body(msgspec.Struct):
    lora_name: str
    lora_path: str = ""


def adapter_routes(prefix: str, adapters: dict[str, str]) -> Sequence[web.RouteDef]:
    """Returns the routes that change adapters, paths by name."""

    async def load(request: web.Request) -> web.Response:
        body = parse(await request.read(), _Body)
        adapters[body.lora_name] = body.lora_path
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(request: web.Request) -> web.Response:
        body = parse(await request.read(), _Body)
        adapters.pop(body.lora_name, None)
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return [web.post(f"{prefix}/load_lora_adapter", load), web.post(f"{prefix}/unload_lora_adapter", unload)]
