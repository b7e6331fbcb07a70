"""An engine that answers each API with as many tokens as a request asks for, at next to no cost.

python bench/request/agent_engine.py PORT MODEL
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from aiohttp import web

_STEP_SECONDS = 0.002
_WORD = " token"


def _chat(tokens: int) -> tuple[list[Any], Any]:
    usage = {"prompt_tokens": 2000, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 1900}}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    chunk = head | {"choices": [{"index": 0, "delta": {"content": _WORD}, "finish_reason": None}]}
    last = head | {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    message = {"role": "assistant", "content": _WORD * tokens}
    choices = [{"index": 0, "message": message, "finish_reason": "length"}]
    whole = head | {"object": "chat.completion", "choices": choices, "usage": usage}
    return [*[chunk] * tokens, last, head | {"choices": [], "usage": usage}], whole


def _message(tokens: int) -> tuple[list[Any], Any]:
    usage = {"input_tokens": 100, "cache_read_input_tokens": 1900, "output_tokens": tokens}
    whole = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "max_tokens"}
    whole |= {"content": [{"type": "text", "text": _WORD * tokens}], "usage": usage}
    delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": _WORD}}
    end = {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": usage}
    return [{"type": "message_start", "message": whole}, *[delta] * tokens, end, {"type": "message_stop"}], whole


def _response(tokens: int) -> tuple[list[Any], Any]:
    usage = {"input_tokens": 2000, "input_tokens_details": {"cached_tokens": 1900}, "output_tokens": tokens}
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed"}
    item |= {"content": [{"type": "output_text", "text": _WORD * tokens, "annotations": []}]}
    whole = {"id": "resp_1", "object": "response", "status": "completed", "model": "m", "output": [item]}
    whole |= {"usage": usage}
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    delta = {"type": "response.output_text.delta", "sequence_number": 1, "delta": _WORD} | place
    return [{"type": "response.created"}, *[delta] * tokens, {"type": "response.completed", "response": whole}], whole


ANSWERS = {"/v1/chat/completions": _chat, "/v1/messages": _message, "/v1/responses": _response}


def _event(body: dict[str, Any]) -> bytes:
    name = f"event: {body['type']}\n" if "type" in body else ""
    return f"{name}data: {json.dumps(body)}\n\n".encode()


async def answer(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    tokens = body.get("max_tokens") or body.get("max_output_tokens")
    events, whole = ANSWERS[request.path](tokens)
    if not body.get("stream"):
        return web.json_response(whole)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(_event(event))
        await asyncio.sleep(_STEP_SECONDS)
    return response


def main(port: int, model: str) -> None:
    """Serves until it is stopped."""

    async def models(request: web.Request) -> web.Response:  # noqa: ARG001
        return web.json_response({"object": "list", "data": [{"id": model, "object": "model"}]})

    app = web.Application(client_max_size=1 << 30)
    app.add_routes([web.get("/v1/models", models), *(web.post(path, answer) for path in ANSWERS)])
    web.run_app(app, host="127.0.0.1", port=port, print=None)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
