"""Conversations as coding agents hold them, as bodies of Anthropic's Messages and of OpenAI's Responses."""

from __future__ import annotations

import json
import random
from typing import Any

from ...tool_chats import generate

_WORDS = ["weather", "größe", "東京", 'a "quoted" word', "<b>&'x", "emoji 🦊", "back\\slash", "zeile\nzwei", "é"]


def messages(seed: int, count: int) -> list[dict[str, Any]]:
    """Returns bodies of Messages."""
    draw = random.Random(seed)
    return [_message(draw, _tools(chat)) for chat in generate(seed, count)]


def responses(seed: int, count: int) -> list[dict[str, Any]]:
    """Returns bodies of Responses."""
    draw = random.Random(seed)
    return [_response(draw, _tools(chat)) for chat in generate(seed, count)]


def _message(draw: random.Random, tools: list[dict[str, Any]]) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    for turn in range(draw.randint(0, 3)):
        turns.append({"role": "user", "content": _said(draw)})
        calls = [_use(draw, tools, f"toolu_{turn}{index}abc") for index in range(draw.randint(0, 2))]
        blocks: list[dict[str, Any]] = []
        if draw.random() < 0.5:
            blocks.append({"type": "thinking", "thinking": _text(draw), "signature": "s"})
        if not calls or draw.random() < 0.5:
            blocks.append({"type": "text", "text": _text(draw)})
        turns.append({"role": "assistant", "content": blocks + calls if calls or draw.random() < 0.7 else _text(draw)})
        if calls:
            results = [_result(draw, call["id"]) for call in calls]
            also = [{"type": "text", "text": _text(draw)}] if draw.random() < 0.3 else []
            turns += [{"role": "user", "content": results + also}, {"role": "assistant", "content": _text(draw)}]
    turns.append({"role": "user", "content": _said(draw)})
    if draw.random() < 0.4:
        # Agents remind the model so.
        turns.insert(draw.randint(0, len(turns)), {"role": "system", "content": [_block(draw), _block(draw)]})
    body: dict[str, Any] = {"messages": turns, "max_tokens": 1}
    if draw.random() < 0.7:
        body["tools"] = [
            {name: function[name] for name in ("name", "description") if function.get(name) is not None}
            | {"input_schema": {"type": "object"} | (function.get("parameters") or {})}
            for function in tools
        ]
        if draw.random() < 0.5:
            body["tool_choice"] = {"type": draw.choice(["auto", "none"])}
    kind = draw.random()
    if kind < 0.4:
        body["system"] = _text(draw)
    elif kind < 0.7:
        body["system"] = [_block(draw) for _ in range(draw.randint(1, 3))]
        if draw.random() < 0.3:
            billing = f"x-anthropic-billing-header: cch={draw.randrange(999)};"
            body["system"].insert(0, {"type": "text", "text": billing})
    return body


def _said(draw: random.Random) -> str | list[dict[str, Any]]:
    return _text(draw) if draw.random() < 0.5 else [_block(draw) for _ in range(draw.randint(1, 3))]


def _block(draw: random.Random) -> dict[str, Any]:
    cached = {"cache_control": {"type": "ephemeral"}} if draw.random() < 0.3 else {}
    return {"type": "text", "text": _text(draw)} | cached


def _use(draw: random.Random, tools: list[dict[str, Any]], identity: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": identity, "name": draw.choice(tools)["name"], "input": _arguments(draw)}


def _result(draw: random.Random, identity: str) -> dict[str, Any]:
    contents = [_text(draw), [_block(draw) for _ in range(draw.randint(1, 2))], None]
    result = {"type": "tool_result", "tool_use_id": identity}
    if (content := draw.choice(contents)) is not None:
        result["content"] = content
    return result | ({"is_error": True} if draw.random() < 0.2 else {})


def _response(draw: random.Random, tools: list[dict[str, Any]]) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for turn in range(draw.randint(0, 3)):
        items.append({"role": "user", "content": _input(draw)})
        if draw.random() < 0.5:
            thought = {"type": "reasoning_text", "text": _text(draw)}
            items.append({"type": "reasoning", "id": f"rs_{turn}", "summary": [], "content": [thought]})
        calls = [f"call_{turn}{index}" for index in range(draw.randint(0, 2))]
        if not calls or draw.random() < 0.5:
            items.append(_output(draw, f"msg_{turn}"))
        for call in calls:
            arguments = json.dumps(_arguments(draw), ensure_ascii=draw.random() < 0.5)
            called = {"type": "function_call", "id": f"fc_{call}", "call_id": call, "arguments": arguments}
            items.append(called | {"name": draw.choice(tools)["name"], "status": "completed"})
        items += [{"type": "function_call_output", "call_id": call, "output": _text(draw)} for call in calls]
        if calls:
            items.append(_output(draw, f"msg_{turn}b"))
    items.append({"role": "user", "content": _input(draw)})
    body: dict[str, Any] = {"input": items if len(items) > 1 or draw.random() < 0.5 else _text(draw)}
    body |= {"max_output_tokens": 1, "store": False}
    if draw.random() < 0.7:
        kept = ("name", "description", "strict")
        body["tools"] = [
            {"type": "function", "parameters": {"type": "object"} | (function.get("parameters") or {})}
            | {name: function[name] for name in kept if function.get(name) is not None}
            for function in tools
        ]
        # vLLM constrains the output of strict tools, and refuses names that are not ASCII.
        body["tool_choice"] = "none" if any(tool.get("strict") for tool in body["tools"]) else "auto"
    if draw.random() < 0.6:
        body["instructions"] = _text(draw)
    return body


def _input(draw: random.Random) -> str | list[dict[str, Any]]:
    if draw.random() < 0.5:
        return _text(draw)
    return [{"type": "input_text", "text": _text(draw)} for _ in range(draw.randint(1, 2))]


def _output(draw: random.Random, identity: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": _text(draw), "annotations": []}
    return {"type": "message", "id": identity, "role": "assistant", "status": "completed", "content": [part]}


def _tools(chat: dict[str, Any]) -> list[dict[str, Any]]:
    return [tool["function"] for tool in chat["tools"]]


def _arguments(draw: random.Random) -> dict[str, Any]:
    values = [None, True, 7, -3.5, "", draw.choice(_WORDS), ["a", 1], {"é": None}]
    return {f"k{index}": draw.choice(values) for index in range(draw.randint(0, 3))}


def _text(draw: random.Random) -> str:
    return " ".join(draw.choices(_WORDS, k=draw.randint(1, 12)))
