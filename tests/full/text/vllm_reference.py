"""Renders and tokenizes chats with vLLM's own code, as its server does. Runs in an environment with vLLM.

    python vllm_reference.py DIRECTORY < chats.json > results.json

``chats.json`` has ``templates`` by name, and ``chats``: bodies with the name of a template each. The results have
vLLM's release, and for each chat its token ids or an error.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from vllm import __version__
from vllm.config import ModelConfig, VllmConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers import renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer


async def main() -> None:
    model = ModelConfig(model=sys.argv[1], tokenizer=sys.argv[1], dtype="float32", max_model_len=1 << 20)
    renderer = renderer_from_config(VllmConfig(model_config=model))
    given = json.load(sys.stdin)
    renderers = {
        name: OnlineRenderer(
            model,
            renderer,
            request_logger=None,
            chat_template=template,
            chat_template_content_format="auto",
            enable_auto_tools=True,
            tool_parser="hermes",
        )
        for name, template in given["templates"].items()
    }
    results = [await ids(renderers[chat.pop("template")], chat) for chat in given["chats"]]
    json.dump({"release": __version__, "results": results}, sys.stdout)


async def ids(renderer: OnlineRenderer, chat: dict[str, Any]) -> dict[str, Any]:
    try:
        rendered: Any = await renderer.render_chat(ChatCompletionRequest.model_validate(chat))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    if not isinstance(rendered, tuple):
        return {"error": str(rendered)}
    return {"ids": rendered[1][0]["prompt_token_ids"]}


asyncio.run(main())
