"""The body of OpenAI's Responses, and its input and tools as those of a chat. Pure.

vLLM translates in the same way, so prompts have the same tokens on both ways and share their caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from kvrouter.frontend.edge.json_body import check_parts, invalid
from kvrouter.frontend.edge.request_fields import OnlyDefault, UInt32
from kvrouter.frontend.edge.translated_request import RoutingFields, named


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much the model reasons. Summaries are those of OpenAI's own models."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Form of the output."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_obfuscation: bool | None = None


class ResponsesFields(RoutingFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields of the body. None stands for the default."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    max_output_tokens: UInt32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    include: list[str] | None = None
    # Of the client's business, and of OpenAI's own servers and models.
    metadata: dict[str, str | None] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    context_management: Any = None
    truncation: str | None = None
    max_tool_calls: UInt32 | None = None
    client_metadata: dict[str, Any] | None = None
    # They need stored responses, or run on OpenAI's servers.
    previous_response_id: OnlyDefault = None
    store: OnlyDefault = False
    background: OnlyDefault = False
    background_options: OnlyDefault = None
    conversation: OnlyDefault = None
    prompt: OnlyDefault = None
    access_programs: OnlyDefault = None
    image: OnlyDefault = None
    moderation: OnlyDefault = None
    top_logprobs: OnlyDefault = 0


class EngineResponsesFields(ResponsesFields, frozen=True, forbid_unknown_fields=False, kw_only=True):
    """The same for an engine that serves the API itself: fields it may know besides are its own business."""


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
    check_parts(fields.input, "input")
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
    check_parts(tools, "tools")
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
