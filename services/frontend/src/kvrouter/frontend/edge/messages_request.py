"""Requests of Anthropic's Messages as chats."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import msgspec
from kvrouter.engines.fields import MESSAGES
from kvrouter.frontend.edge.choice import WholeSink
from kvrouter.frontend.edge.event_stream import EventStream
from kvrouter.frontend.edge.frame import ResponseFrame
from kvrouter.frontend.edge.json_body import check_structure, decode_json, invalid
from kvrouter.frontend.edge.messages_chat import (
    EngineMessagesFields,
    MessagesFields,
    PromptFields,
    Thinking,
    chat_messages,
    chat_tool_choice,
    chat_tools,
)
from kvrouter.frontend.edge.messages_response import MessageEvents, WholeMessage
from kvrouter.frontend.edge.request_fields import check_defaults
from kvrouter.frontend.edge.translated_request import (
    ROUTING_FIELDS,
    TranslatedRequest,
    copied,
    given,
    shallow,
    translated_chat,
)

_FIELDS = msgspec.json.Decoder(MessagesFields, strict=False)
_COUNTED_FIELDS = msgspec.json.Decoder(PromptFields, strict=False)
_ENGINE_FIELDS = msgspec.json.Decoder(EngineMessagesFields, strict=False)
_THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}


class MessagesRequest(TranslatedRequest):
    """One request to create a message."""

    path: ClassVar[str] = MESSAGES
    names: ClassVar[dict[str, str]] = {"stop": "stop_sequences", "response_format": "output_config"}

    def __init__(self, chat: dict[str, Any]) -> None:
        self.chat = chat

    @classmethod
    def parse(cls, body: bytes | bytearray) -> Self:
        """Parses a body; see ``TranslatedRequest.read``."""
        check_structure(body)
        fields = decode_json(_FIELDS, body)
        choice = fields.tool_choice
        chat = _prompt(fields) | copied(
            fields, "max_tokens", "stream", "temperature", "top_k", "top_p", *ROUTING_FIELDS
        )
        chat |= given(
            stop=fields.stop_sequences,
            parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
            response_format=_response_format(fields),
        )
        return cls(chat)

    @classmethod
    def counted(cls, body: bytes | bytearray) -> Self:
        """Parses a body whose tokens are counted.

        Raises:
            BadRequest: it is malformed; the error names the field.
        """
        check_structure(body)
        with shallow():
            return cls(_prompt(decode_json(_COUNTED_FIELDS, body)))

    @classmethod
    def engine_chat(cls, body: bytes | bytearray) -> dict[str, Any]:
        """Returns the chat as vLLM makes it; see ``TranslatedRequest.engine_chat``."""
        return _chat(decode_json(_ENGINE_FIELDS, body))

    @classmethod
    def check_passed(cls, body: bytes | bytearray) -> None:
        """Returns: every message has its whole conversation."""

    def whole(self, frame: ResponseFrame) -> WholeSink:
        """Returns the sink of a whole message."""
        return WholeMessage(frame)

    def streamed(self, frame: ResponseFrame, events: EventStream) -> MessageEvents:
        """Returns the sink of a stream."""
        return MessageEvents(frame, events)


def _chat(fields: PromptFields) -> dict[str, Any]:
    """Returns the fields of the chat that make its prompt, as engines set them."""
    return translated_chat(
        fields,
        chat_messages(fields),
        tools=chat_tools(fields.tools),
        tool_choice=chat_tool_choice(fields.tool_choice),
        reasoning_effort=None if fields.output_config is None else fields.output_config.effort,
    )


def _prompt(fields: PromptFields) -> dict[str, Any]:
    """Returns the same with what engines do not set: whether it reasons, and the final message to continue."""
    check_defaults(fields)
    chat = _chat(fields)
    final = chat["messages"][-1] if chat["messages"] else {}
    if final.get("role") == "assistant" and "tool_calls" not in final and final.get("content"):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if fields.thinking is not None:
        chat["chat_template_kwargs"] = _thinking(fields.thinking) | (fields.chat_template_kwargs or {})
    return chat


def _thinking(thinking: Thinking) -> dict[str, Any]:
    """Returns the switches of templates, of which each family has one."""
    thinks = _THINKING.get(thinking.type)
    if thinks is None:
        raise invalid("thinking.type", f"expected one of {', '.join(_THINKING)}")
    return {"enable_thinking": thinks, "thinking": thinks}


def _response_format(fields: MessagesFields) -> dict[str, Any] | None:
    form = fields.output_config.format if fields.output_config is not None else None
    if form is None:
        return None
    if form.type != "json_schema":
        raise invalid("output_config.format.type", "expected json_schema")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form.schema}}
