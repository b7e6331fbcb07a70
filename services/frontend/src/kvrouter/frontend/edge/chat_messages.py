"""The messages of a chat as templates expect them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvrouter.engines.chats import ChatRule
from kvrouter.v1.errors import BadRequest

MAX_MESSAGES = 65_536
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send an earlier message's reasoning."""
_TEXT_PARTS = ("text", "input_text", "refusal")


def template_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages as ``transformers`` passes them to a template, with empty contents as texts, as vLLM does.

    Raises:
        BadRequest: there are none or too many, or one has no role, or contents of another kind than text.
    """
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise BadRequest(
            f"messages: expected 1 to {MAX_MESSAGES} messages, received {len(messages)}",
            field="messages",
            advice='Send at least one message, such as {"role": "user", "content": "Hello"}.',
        )
    return [_message(message, index) for index, message in enumerate(messages)]


def as_engine_renders(messages: list[dict[str, Any]], rule: ChatRule, *, continues: bool) -> list[dict[str, Any]]:
    """Returns messages as an engine passes them to a template.

    Args:
        messages: The messages.
        rule: The engine's rule.
        continues: Whether the prompt ends within the final message.
    """
    rendered = list(messages)
    for index, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            rendered[index] = {**message, "tool_calls": list(map(rule.tool_call, calls))}
    final = rendered[-1]
    if rule.user_speaks_last and not continues and final["role"] == "assistant" and isinstance(final["content"], str):
        rendered[-1] = {"role": "user", "content": final["content"]}
    return rendered


def with_text_content(message: dict[str, Any], separator: str) -> dict[str, Any]:
    """Returns a message whose content is a text, made of its parts if it is a list."""
    content = message["content"]
    if not isinstance(content, list):
        return message
    return {**message, "content": separator.join(part.get("text") or part.get("refusal") or "" for part in content)}


def with_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message whose content is a list of parts."""
    content = message["content"]
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    # Clients send the fields that an earlier response had, without a value too. Templates ask whether they exist.
    given = {name: value for name, value in message.items() if value is not None}
    role, content = given.get("role"), given.setdefault("content", "")
    path = f"messages.{index}"
    if not isinstance(role, str) or not role:
        raise _invalid(f"{path}.role", "expected a role, such as user")
    if isinstance(content, list):
        for place, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in _TEXT_PARTS or not isinstance(part.get("text", part.get(kind)), str):
                raise _invalid(f"{path}.content.{place}", f"expected a part of type text, received {str(kind)[:32]!r}")
    elif not isinstance(content, str):
        raise _invalid(f"{path}.content", "expected a text or a list of parts")
    reasoning = next((given[name] for name in _REASONING if name in given), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise _invalid(f"{path}.reasoning_content", "expected a text")
        given = {"thinking": reasoning, **given, "reasoning_content": reasoning}
    calls = given.get("tool_calls")
    if calls is None:
        return given
    if not isinstance(calls, list):
        raise _invalid(f"{path}.tool_calls", "expected a list")
    return {**given, "tool_calls": [_tool_call(call, f"{path}.tool_calls.{place}") for place, call in enumerate(calls)]}


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    """Returns a tool call with its arguments as an object, since templates print them."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _invalid(path, "expected a function with a name")
    arguments = function.get("arguments")
    if arguments is None or isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise _invalid(f"{path}.function.arguments", "expected JSON") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _invalid(path: str, message: str) -> BadRequest:
    return BadRequest(f"{path}: {message}", field=path, advice="Correct the message.")
