"""One conversation of a coding agent as the bodies of three APIs: a chat, Messages and Responses."""

from __future__ import annotations

import json
from random import Random
from typing import Any

MARK = "REQUEST-NUMBER"
"""Stands in each body once; each request has another text there, late in its prompt."""
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
_TURNS, _TOOLS = 20, 8
_WORDS = ("read", "the", "file", "find", "where", "it", "opens", "sockets", "then", "write", "a", "failing", "test")


def bodies(model: str, *, output: int, stream: bool) -> dict[str, bytes]:
    """Returns the body for each API.

    Args:
        model: Name of the model.
        output: Maximum number of output tokens.
        stream: Whether responses are streamed.
    """
    draw = Random(7)

    def text(words: int) -> str:
        return " ".join(draw.choices(_WORDS, k=words))

    system = text(400)
    schema = {
        "type": "object",
        "properties": {name: {"type": "string", "description": text(12)} for name in ("path", "pattern", "text")},
        "required": ["path"],
    }
    tools = [(f"tool_{number}", text(40), schema) for number in range(_TOOLS)]
    turns = [(f"call_{number}", f"tool_{number % _TOOLS}", text(15), text(60)) for number in range(_TURNS)]
    chat: list[dict[str, Any]] = [{"role": "system", "content": system}, {"role": "user", "content": text(60)}]
    messages: list[dict[str, Any]] = chat[1:]
    items: list[dict[str, Any]] = chat[1:]
    for call_id, name, said, result in turns:
        arguments = {"path": f"src/{call_id}.py", "pattern": said}
        encoded = json.dumps(arguments)
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": encoded}}
        chat += [
            {"role": "assistant", "content": said, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call_id, "content": result},
        ]
        use = {"type": "tool_use", "id": call_id, "name": name, "input": arguments}
        messages = [
            *messages,
            {"role": "assistant", "content": [{"type": "text", "text": said}, use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": result}]},
        ]
        items = [
            *items,
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": said}]},
            {"type": "function_call", "call_id": call_id, "name": name, "arguments": encoded},
            {"type": "function_call_output", "call_id": call_id, "output": result},
        ]
    last = {"role": "user", "content": MARK}
    common = {"model": model, "stream": stream, "temperature": 0}
    functions = [{"name": name, "description": said, "parameters": parameters} for name, said, parameters in tools]
    whole = {
        "chat": common
        | {"messages": [*chat, last], "tools": [{"type": "function", "function": each} for each in functions]}
        | {"max_tokens": output},
        "messages": common
        | {"system": system, "messages": [*messages, last], "max_tokens": output}
        | {"tools": [{"name": name, "description": said, "input_schema": form} for name, said, form in tools]},
        "responses": common
        | {"instructions": system, "input": [*items, last], "max_output_tokens": output, "store": False}
        | {"tools": [{"type": "function"} | each for each in functions]},
    }
    return {api: json.dumps(body).encode() for api, body in whole.items()}
