"""The body of OpenAI's Responses, and its input and tools as those of a chat. Pure.

vLLM translates in the same way, so prompts have the same tokens on both ways and share their caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from kvrouter.frontend.edge.json_body import Place, check_parts, invalid
from kvrouter.frontend.edge.request_fields import OnlyDefault, UInt32
from kvrouter.frontend.edge.translated_request import RoutingFields, needed, needed_name


class Part(msgspec.Struct, frozen=True, gc=False):
    """A part of a content. Its type says which field it has."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None


class Item(msgspec.Struct, frozen=True, gc=False):
    """A part of the conversation. Its type says which fields it has."""

    type: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None


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

    input: str | list[Item]
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
_TEXT_PARTS = ("input_text", "output_text", "text")


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
    check_parts(fields.input, "input", (each.content for each in fields.input))
    for index, item in enumerate(fields.input):
        _add(messages, item, ("input", index))
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
        if tool.get("type") != "function":
            message = f"expected function, received {str(tool.get('type'))[:64]!r}"
            raise invalid((("tools", index), "type"), message, "Leave the tool out.")
        known = ("description", "parameters", "strict", "defer_loading")
        name = needed_name(tool.get("name"), ("tools", index))
        function = {"name": name} | {key: tool[key] for key in known if tool.get(key) is not None}
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
    return {"type": "function", "function": {"name": needed_name(choice.get("name"), "tool_choice")}}


def response_format(form: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns the constraint of the output; None if it is free."""
    if form is None or form.get("type") in (None, "text"):
        return None
    if form.get("type") != "json_schema":
        return dict(form)
    return {"type": "json_schema", "json_schema": {name: form[name] for name in ("name", "schema") if name in form}}


def _add(messages: list[dict[str, Any]], item: Item, place: Place) -> None:
    match item.type:
        case None | "message":
            _add_message(messages, item, place)
        case "function_call":
            arguments, call_id = needed(item.arguments, (place, "arguments")), needed(item.call_id, (place, "call_id"))
            function = {"name": needed_name(item.name, place), "arguments": arguments}
            calls = _own(messages).setdefault("tool_calls", [])
            calls.append({"id": call_id, "type": "function", "function": function})
        case "function_call_output":
            call_id, content = needed(item.call_id, (place, "call_id")), _content(item.output, (place, "output"))
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        case "reasoning":
            parts = item.content or item.summary or ()
            if isinstance(parts, str):
                raise invalid((place, "content"), "expected a list of parts")
            thoughts = "".join(part.text or "" for part in parts)
            _own(messages, without="reasoning_content")["reasoning_content"] = thoughts
        case _:
            message = f"an item of type {item.type[:64]!r} cannot be translated to a chat"
            raise invalid(place, message, "Leave it out.")


def _add_message(messages: list[dict[str, Any]], item: Item, place: Place) -> None:
    if item.role not in _ROLES:
        raise invalid((place, "role"), f"expected one of {', '.join(_ROLES)}")
    content = _content(item.content, (place, "content"))
    if item.role != "assistant":
        messages.append({"role": item.role, "content": content})
        return
    if isinstance(content, list):
        content = "".join([part.get("text", "") for part in content])
    _own(messages, without="content")["content"] = content


def _own(messages: list[dict[str, Any]], without: str = "") -> dict[str, Any]:
    """Returns the last message if it is the model's and has no such field; otherwise a new one of the model.

    Reasoning, text and calls of one turn are several items, and one message.
    """
    if not messages or messages[-1]["role"] != "assistant" or without in messages[-1]:
        messages.append({"role": "assistant"})
    return messages[-1]


def _content(content: str | Sequence[Part] | None, place: Place) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if content is None:
        raise invalid(place, "expected a text or a list of parts")
    return [_part(part, (place, index)) for index, part in enumerate(content)]


def _part(part: Part, place: Place) -> dict[str, Any]:
    text = part.refusal if part.type == "refusal" else part.text if part.type in _TEXT_PARTS else None
    if text is not None:
        return {"type": "text", "text": text}
    if part.type == "input_image" and part.image_url is not None:
        return {"type": "image_url", "image_url": {"url": part.image_url}}
    message = f"a part of type {str(part.type)[:64]!r} cannot be translated to a chat"
    raise invalid(place, message, "Send a text.")
