"""Translates the input and tools of OpenAI's Responses to those of a chat. Pure.

vLLM translates in the same way, so prompts have the same tokens on both ways and share their caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvrouter.frontend.edge.responses_fields import ResponsesFields
from kvrouter.frontend.edge.translated_request import invalid, named

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Field with the text by type of a part."""


def chat_messages(fields: ResponsesFields) -> list[dict[str, Any]]:
    """Returns the messages of the chat.

    Raises:
        BadRequest: an item is malformed, or of a kind that no chat has.
    """
    if not fields.input:
        raise invalid("input", "expected a text or at least one item", "Send a message of the user.")
    messages = [{"role": "system", "content": fields.instructions}] if fields.instructions else []
    if isinstance(fields.input, str):
        return [*messages, {"role": "user", "content": fields.input}]
    for index, item in enumerate(fields.input):
        _add(messages, item, f"input.{index}")
    return messages


def chat_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Returns the tools of the chat; None if there are none.

    Raises:
        BadRequest: one is malformed, or no function.
    """
    if not tools:
        return None
    functions = []
    for index, tool in enumerate(tools):
        path = f"tools.{index}"
        if tool.get("type") != "function":
            raise invalid(
                f"{path}.type", f"expected function, received {str(tool.get('type'))[:64]!r}", "Leave the tool out."
            )
        known = ("description", "parameters", "strict", "defer_loading")
        function = {"name": named(tool, path)} | {name: tool[name] for name in known if tool.get(name) is not None}
        functions.append({"type": "function", "function": function})
    return functions


def chat_tool_choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    """Returns the choice of the chat.

    Raises:
        BadRequest: it is none of a function.
    """
    if choice is None or isinstance(choice, str):
        return choice
    if choice.get("type") != "function":
        raise invalid("tool_choice", "expected none, auto, required or a function")
    return {"type": "function", "function": {"name": named(choice, "tool_choice")}}


def response_format(form: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns the constraint of the output; None if it is free."""
    if form is None or form.get("type") in (None, "text"):
        return None
    if form.get("type") != "json_schema":
        return dict(form)
    return {"type": "json_schema", "json_schema": {name: form[name] for name in ("name", "schema") if name in form}}


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any], path: str) -> None:
    kind = item.get("type")
    if kind in (None, "message"):
        _add_message(messages, item, path)
    elif kind == "function_call":
        arguments, call_id = item.get("arguments"), item.get("call_id")
        if not isinstance(arguments, str) or not isinstance(call_id, str):
            raise invalid(path, "expected texts as arguments and call_id")
        function = {"name": named(item, path), "arguments": arguments}
        calls = _own(messages).setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})
    elif kind == "function_call_output":
        if not isinstance(call_id := item.get("call_id"), str):
            raise invalid(f"{path}.call_id", "expected a text")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": _content(item, "output", path)})
    elif kind == "reasoning":
        own = _own(messages, without="reasoning_content")
        own["reasoning_content"] = _reasoning(item, path)
    else:
        raise invalid(path, f"an item of type {str(kind)[:64]!r} cannot be translated to a chat", "Leave it out.")


def _add_message(messages: list[dict[str, Any]], item: Mapping[str, Any], path: str) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise invalid(f"{path}.role", f"expected one of {', '.join(_ROLES)}")
    content = _content(item, "content", path)
    if role != "assistant":
        messages.append({"role": role, "content": content})
        return
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    _own(messages, without="content")["content"] = content


def _own(messages: list[dict[str, Any]], without: str = "") -> dict[str, Any]:
    """Returns the last message if it is the model's and has no such field; otherwise a new one of the model.

    Reasoning, text and calls of one turn are several items, and one message.
    """
    if not messages or messages[-1]["role"] != "assistant" or without in messages[-1]:
        messages.append({"role": "assistant"})
    return messages[-1]


def _content(item: Mapping[str, Any], name: str, path: str) -> str | list[dict[str, Any]]:
    content = item.get(name)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{path}.{name}", "expected a text or a list of parts")
    return [_part(part, f"{path}.{name}.{index}") for index, part in enumerate(content)]


def _part(part: Any, path: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and isinstance(text := part.get(_TEXT_PARTS.get(kind, "")), str):
        return {"type": "text", "text": text}
    if kind == "input_image" and isinstance(url := part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": url}}
    raise invalid(path, f"a part of type {str(kind)[:64]!r} cannot be translated to a chat", "Send a text.")


def _reasoning(item: Mapping[str, Any], path: str) -> str:
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise invalid(path, "expected a list of parts as content or summary")
    texts = [part.get("text") for part in parts]
    return "".join(text for text in texts if isinstance(text, str))
